// Online softmax over the rows of a warp's mma tile, the one place that does it.
//
// The running maximum may lag behind: it moves only when a row's exponentials would grow by more than 2^8. What is subtracted
// from the logits does not change the result as long as nothing overflows, and moving it costs a rescaling of the output.
//
// Where there may be a bias (kNatural), the maximum is a logit, not a logit in base 2. Floats around -1e9 are 64 apart, so the
// product of such a logit with log2(e) must not be rounded before the maximum is subtracted.
#pragma once

#include "../calls.h"
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

// The logarithm of a sum of exponentials, as a float and what rounding left out of it.
struct LogSum {
  float value, rest;
};

// maximum + log(sum) for sum > 0. The hardware's logarithm has an error of at most 2^-21.
__device__ __forceinline__ LogSum add_log(float maximum, float sum) {
  const float log = __logf(sum), total = maximum + log, from_log = total - maximum;
  return {total, (maximum - (total - from_log)) + (log - from_log)};
}

// The state of the rows of kTiles tiles of 16 rows: a thread has rows lane / 4 and lane / 4 + 8 of each.
template <int kTiles, bool kNatural>
struct OnlineSoftmax {
  static constexpr float kLag = kNatural ? 8.0f * kLn2 : 8.0f;
  float maximum[kTiles][2];  // with kNatural a logit, otherwise in base 2
  float sum[kTiles][2];      // this thread's part

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      maximum[m][0] = maximum[m][1] = negative_infinity();
      sum[m][0] = sum[m][1] = 0.0f;
    }
  }

  // The factor of old sums when the maximum moves from `maximum` to `next`.
  static __device__ __forceinline__ float factor_between(float maximum, float next) {
    if (next == negative_infinity()) return 1.0f;
    return exp2_approx(kNatural ? (maximum - next) * kLog2e : maximum - next);
  }
  // What is subtracted from the logits of a row.
  static __device__ __forceinline__ float reference_of(float maximum) { return maximum == negative_infinity() ? 0.0f : maximum; }

  // Scores become exp(logit - maximum); out is rescaled when the maximum moves. With kNatural scores are logits; otherwise
  // scores * to_base_2 are logits in base 2, and to_base_2 is positive.
  template <int kColumns, int kOut>
  __device__ __forceinline__ void update(float (&scores)[kTiles][kColumns][4], float to_base_2, float (&out)[kTiles][kOut][4]) {
    // Find the largest logit of each row.
    float grown[kTiles][2];
    bool moves = false;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float largest = fmaxf(scores[m][0][2 * r], scores[m][0][2 * r + 1]);
#pragma unroll
        for (int n = 1; n < kColumns; ++n) largest = fmaxf(largest, fmaxf(scores[m][n][2 * r], scores[m][n][2 * r + 1]));
        grown[m][r] = max_over_quad(largest) * (kNatural ? 1.0f : to_base_2);
        moves |= grown[m][r] > maximum[m][r] + kLag;
      }
    }
    // Move the maximum where logits have outgrown it, and rescale what was summed up to now.
    if (__any_sync(0xffffffffu, moves)) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float next = fmaxf(maximum[m][r], grown[m][r]), factor = factor_between(maximum[m][r], next);
          maximum[m][r] = next;
          sum[m][r] *= factor;
#pragma unroll
          for (int n = 0; n < kOut; ++n) out[m][n][2 * r] *= factor, out[m][n][2 * r + 1] *= factor;
        }
      }
    }
    // Turn scores into weights, and add them up.
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float reference = reference_of(maximum[m][r]);
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            const float logit = scores[m][n][e];
            scores[m][n][e] = exp2_approx(kNatural ? (logit - reference) * kLog2e : fmaf(logit, to_base_2, -reference));
            sum[m][r] += scores[m][n][e];
          }
        }
      }
    }
  }

  // After the last update: the natural logarithm of the row's sum of exponentials, and the factor that normalises the output, 0
  // for a row that sees nothing. The hardware's reciprocal, with an error of at most 2^-21, saves time that all threads would
  // wait.
  __device__ __forceinline__ void finish(int m, int r, LogSum& log_sum, float& factor) const {
    const float total = sum_over_quad(sum[m][r]);
    log_sum = total == 0.0f ? LogSum{negative_infinity(), 0.0f} : add_log(kNatural ? maximum[m][r] : maximum[m][r] * kLn2, total);
    factor = total == 0.0f ? 0.0f : __fdividef(1.0f, total);
  }
};

// The same for one tile of 16 rows and a kernel that has other work between the parts of an update. Rescaling waits for a
// product, so it is a step of its own. Maxima and sums are computed in four chains, because nothing else hides their latency.
template <bool kNatural>
struct OnlineSoftmaxInParts : OnlineSoftmax<1, kNatural> {
  using Base = OnlineSoftmax<1, kNatural>;
  using Base::kLag, Base::maximum, Base::sum;
  static constexpr int kChains = 4;

  // True when the maximum of some row of the warp moves; then out has to be rescaled by `factor`. Only then do the threads that
  // share a row compare their maxima. scores * unit is in the units of the maximum.
  template <int kColumns>
  __device__ __forceinline__ bool move_maximum(const float (&scores)[kColumns][4], float unit, float (&factor)[2]) {
    static_assert(kChains == 4 && kColumns >= 2);
    float largest[2][kChains];  // of this thread's columns
    bool moves = false;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // one at a time: a maximum of two on the way would need registers
        float& chain = largest[e / 2][(2 * n + e % 2) % kChains];
        chain = 2 * n + e % 2 < kChains ? scores[n][e] : fmaxf(chain, scores[n][e]);
      }
    }
    float grown[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      grown[r] = fmaxf(fmaxf(largest[r][0], largest[r][1]), fmaxf(largest[r][2], largest[r][3])) * unit;
      moves |= grown[r] > maximum[0][r] + kLag;
    }
    moves = __any_sync(0xffffffffu, moves);
    if (moves) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float next = fmaxf(maximum[0][r], max_over_quad(grown[r]));
        factor[r] = Base::factor_between(maximum[0][r], next);
        maximum[0][r] = next;
        sum[0][r] *= factor[r];
      }
    }
    return moves;
  }

  // Logits become exponents in base 2. Where logits may be huge this takes the place of the subtraction in exponentiate.
  template <int kColumns>
  __device__ __forceinline__ void subtract_maximum(float (&scores)[kColumns][4]) const {
    static_assert(kNatural);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[n][e] = (scores[n][e] - Base::reference_of(maximum[0][e / 2])) * kLog2e;
    }
  }

  // Scores become exp(logit - maximum) and are added to the sums. scores * to_base_2 are logits in base 2, or with is_subtracted
  // exponents, from which the maximum has been subtracted.
  template <int kColumns>
  __device__ __forceinline__ void exponentiate(float (&scores)[kColumns][4], float to_base_2, bool is_subtracted) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float reference = Base::reference_of(maximum[0][r]);
      if (kNatural) reference = is_subtracted ? 0.0f : reference * kLog2e;
      float parts[kChains] = {sum[0][r]};
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& element = scores[n][2 * r + e];
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
