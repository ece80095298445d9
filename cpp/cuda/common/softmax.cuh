// Online softmax over the rows of a warp's mma tile, the one place that does it.
//
// The one surprise is that the running maximum may lag: it moves only when a row grows by more than 2^8, because any reference
// point gives the same result as long as nothing overflows, and rescaling the output is what costs.
#pragma once

#include "device.cuh"

namespace dmattn::cuda {

__device__ __forceinline__ float max_over_quad(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float sum_over_quad(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// kTiles m16 tiles: a thread holds rows lane / 4 and lane / 4 + 8 of each.
template <int kTiles>
struct OnlineSoftmax {
  static constexpr float kLag = 8.0f;
  float maximum[kTiles][2], sum[kTiles][2];  // base 2; sum is this thread's part

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      maximum[m][0] = maximum[m][1] = negative_infinity();
      sum[m][0] = sum[m][1] = 0.0f;
    }
  }

  // x (logits; times `to_base_2`, which is positive, they are base 2) becomes exp2(logit - maximum); out is rescaled when the
  // maximum moves.
  template <int kColumns, int kOut>
  __device__ __forceinline__ void update(float (&x)[kTiles][kColumns][4], float to_base_2, float (&out)[kTiles][kOut][4]) {
    float grown[kTiles][2];
    bool moves = false;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float row = fmaxf(x[m][0][2 * r], x[m][0][2 * r + 1]);
#pragma unroll
        for (int n = 1; n < kColumns; ++n) row = fmaxf(row, fmaxf(x[m][n][2 * r], x[m][n][2 * r + 1]));
        grown[m][r] = max_over_quad(row) * to_base_2;
        moves |= grown[m][r] > maximum[m][r] + kLag;
      }
    }
    if (__any_sync(0xffffffffu, moves)) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float next = fmaxf(maximum[m][r], grown[m][r]);
          const float factor = next == negative_infinity() ? 1.0f : exp2_approx(maximum[m][r] - next);
          maximum[m][r] = next;
          sum[m][r] *= factor;
#pragma unroll
          for (int n = 0; n < kOut; ++n) out[m][n][2 * r] *= factor, out[m][n][2 * r + 1] *= factor;
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float reference = maximum[m][r] == negative_infinity() ? 0.0f : maximum[m][r];
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            x[m][n][e] = exp2_approx(fmaf(x[m][n][e], to_base_2, -reference));
            sum[m][r] += x[m][n][e];
          }
        }
      }
    }
  }

  // After the last update: sum over the row, natural logarithm of it, and the factor that normalises the output (0 for an empty
  // row). The hardware's logarithm and reciprocal are right to 2^-21, and everyone waits here.
  __device__ __forceinline__ void finish(int m, int r, float& log_sum, float& factor) const {
    const float total = sum_over_quad(sum[m][r]);
    log_sum = total == 0.0f ? negative_infinity() : maximum[m][r] * kLn2 + __logf(total);
    factor = total == 0.0f ? 0.0f : __fdividef(1.0f, total);
  }
};

// The same for one m16 tile and a kernel that has other work between the parts of an update: rescaling waits for a product, and
// maxima and sums run in four chains, because nothing else hides their latency.
struct OnlineSoftmaxInParts : OnlineSoftmax<1> {
  static constexpr int kChains = 4;

  // True when the maximum of some row of the warp moves: out has to be rescaled by `factor`. The other threads of a row are asked
  // only then.
  template <int kColumns>
  __device__ __forceinline__ bool move_maximum(const float (&x)[kColumns][4], float to_base_2, float (&factor)[2]) {
    static_assert(kChains == 4 && kColumns >= 2);
    float row[2][kChains];  // of this thread's columns
    bool moves = false;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // straight into the chains: a maximum of two on the way would need registers
        float& chain = row[e / 2][(2 * n + e % 2) % kChains];
        chain = 2 * n + e % 2 < kChains ? x[n][e] : fmaxf(chain, x[n][e]);
      }
    }
    float grown[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      grown[r] = fmaxf(fmaxf(row[r][0], row[r][1]), fmaxf(row[r][2], row[r][3])) * to_base_2;
      moves |= grown[r] > maximum[0][r] + kLag;
    }
    moves = __any_sync(0xffffffffu, moves);
    if (moves) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float next = fmaxf(maximum[0][r], max_over_quad(grown[r]));
        factor[r] = next == negative_infinity() ? 1.0f : exp2_approx(maximum[0][r] - next);
        maximum[0][r] = next;
        sum[0][r] *= factor[r];
      }
    }
    return moves;
  }

  template <int kColumns>
  __device__ __forceinline__ void exponentiate(float (&x)[kColumns][4], float to_base_2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float reference = maximum[0][r] == negative_infinity() ? 0.0f : maximum[0][r];
      float parts[kChains] = {sum[0][r]};
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& element = x[n][2 * r + e];
          element = exp2_approx(fmaf(element, to_base_2, -reference));
          parts[(2 * n + e) % kChains] += element;
        }
      }
      sum[0][r] = parts[0];
#pragma unroll
      for (int i = 1; i < kChains; ++i) sum[0][r] += parts[i];
    }
  }

  template <int kOut>
  static __device__ __forceinline__ void rescale(float (&out)[kOut][4], const float (&factor)[2]) {
#pragma unroll
    for (int n = 0; n < kOut; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] *= factor[e / 2];
    }
  }
};

}  // namespace dmattn::cuda
