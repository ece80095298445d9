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

// kTiles m16 tiles: a thread holds rows lane / 4 and lane / 4 + 8 of each. kChains: maxima and sums of a row that run beside each
// other, for kernels that wait for their latency.
template <int kTiles, int kChains = 1>
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
    float factor[kTiles][2];
    if (move_maximum(x, to_base_2, factor)) rescale(out, factor);
    exponentiate(x, to_base_2);
  }

  // The three parts of update. True when the maximum of some row of the warp moves: out has to be rescaled by `factor`.
  template <int kColumns>
  __device__ __forceinline__ bool move_maximum(const float (&x)[kTiles][kColumns][4], float to_base_2,
                                               float (&factor)[kTiles][2]) {
    float grown[kTiles][2];  // of this thread's columns: the other threads of the row are asked only when some maximum moves
    bool moves = false;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float row[kChains];
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          const float pair = fmaxf(x[m][n][2 * r], x[m][n][2 * r + 1]);
          row[n % kChains] = n < kChains ? pair : fmaxf(row[n % kChains], pair);
        }
#pragma unroll
        for (int i = 1; i < kChains; ++i) row[0] = fmaxf(row[0], row[i]);
        grown[m][r] = row[0] * to_base_2;
        moves |= grown[m][r] > maximum[m][r] + kLag;
      }
    }
    moves = __any_sync(0xffffffffu, moves);
    if (moves) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float next = fmaxf(maximum[m][r], max_over_quad(grown[m][r]));
          factor[m][r] = next == negative_infinity() ? 1.0f : exp2_approx(maximum[m][r] - next);
          maximum[m][r] = next;
          sum[m][r] *= factor[m][r];
        }
      }
    }
    return moves;
  }

  template <int kOut>
  __device__ __forceinline__ void rescale(float (&out)[kTiles][kOut][4], const float (&factor)[kTiles][2]) const {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kOut; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[m][n][e] *= factor[m][e / 2];
      }
    }
  }

  template <int kColumns>
  __device__ __forceinline__ void exponentiate(float (&x)[kTiles][kColumns][4], float to_base_2) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float reference = maximum[m][r] == negative_infinity() ? 0.0f : maximum[m][r];
        float parts[kChains] = {sum[m][r]};
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            x[m][n][e] = exp2_approx(fmaf(x[m][n][e], to_base_2, -reference));
            parts[(2 * n + e % 2) % kChains] += x[m][n][e];
          }
        }
        sum[m][r] = parts[0];
#pragma unroll
        for (int i = 1; i < kChains; ++i) sum[m][r] += parts[i];
      }
    }
  }

  // After the last update: sum over the row, natural logarithm of it, and the factor that normalises the output (0 for an empty
  // row).
  __device__ __forceinline__ void finish(int m, int r, float& log_sum, float& factor) const {
    const float total = sum_over_quad(sum[m][r]);
    log_sum = total == 0.0f ? negative_infinity() : maximum[m][r] * kLn2 + logf(total);
    factor = total == 0.0f ? 0.0f : 1.0f / total;
  }
};

}  // namespace dmattn::cuda
