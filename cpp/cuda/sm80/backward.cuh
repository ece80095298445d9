// What both backward kernels do with a block of scores: products to probabilities and score gradients, element by element.
//
// The one surprise is that both leave in place: x holds products and then probabilities, y holds <dout, value> and then the
// gradient of the scaled product, so that a thread never has four copies of its block.
#pragma once

#include "../attention_launch.h"
#include "../common/logits.cuh"
#include "keys.cuh"

namespace dmattn::cuda::sm80 {

// Shared-memory width of a block of scores.
template <int kKeys>
inline constexpr int kScoreWidth = kKeys < 64 ? 64 : kKeys;

// Sums over the rows of a block of the gradients of its logits, per column: the gradient of key_bias. This thread's part.
template <int kN>
struct ColumnSums {
  float sum[kN][2];
  __device__ __forceinline__ ColumnSums() {
#pragma unroll
    for (int n = 0; n < kN; ++n) sum[n][0] = sum[n][1] = 0.0f;
  }
  // add(column, sum over the warp's rows), each column once
  template <class Add>
  __device__ __forceinline__ void finish(int column, Add add) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float total = sum[n][e];
        for (int step = 4; step < 32; step *= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
        if (threadIdx.x % 32 < 4) add(column + 8 * n + e, total);
      }
    }
  }
};

// Products to probabilities, except in the general variant, whose gradients need the products: there to_gradients does both.
// Apart, so that exponentials run beside the second product. `row` and `column` are those of the thread's first element in the
// block; lse2 and delta belong to its rows.
template <Variant kVariant, int kM, int kN, class Stage>
__device__ __forceinline__ void to_probabilities(float (&x)[kM][kN][4], const float (&lse2)[kM][2], const BackwardCall& call,
                                                 const Stage& stage, const Chunk& chunk, int first_query, int row, int column) {
  if constexpr (kVariant == Variant::kGeneral) return;
  const int low = first_query + static_cast<int>(call.b.forward.key_length - call.b.forward.query_length);
  if (chunk.needs_test) hide(x, stage, chunk, row, column, low);
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    float key_bias[2] = {0.0f, 0.0f};
    if constexpr (kVariant == Variant::kGathered) {
      key_bias[0] = stage.key_bias[column + 8 * n] * kLog2e;
      key_bias[1] = stage.key_bias[column + 8 * n + 1] * kLog2e;
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float shift = kVariant == Variant::kGathered ? key_bias[e % 2] - lse2[m][e / 2] : -lse2[m][e / 2];
        x[m][n][e] = exp2_approx(fmaf(x[m][n][e], call.scale_2, shift));
      }
    }
  }
}

template <class T, Variant kVariant, int kM, int kN, class Stage, class KeyOf>
__device__ __forceinline__ void to_gradients(float (&x)[kM][kN][4], float (&y)[kM][kN][4], const float (&lse2)[kM][2],
                                             const float (&delta)[kM][2], ColumnSums<kN>& sums, const BackwardCall& call,
                                             int batch, int head, const Stage& stage, const Chunk& chunk, int first_query,
                                             int row, int column, KeyOf key_of) {
  const AttentionParams& p = call.b.forward;
  if constexpr (kVariant != Variant::kGeneral) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          y[m][n][e] = x[m][n][e] * (y[m][n][e] - delta[m][e / 2]);
          if constexpr (kVariant == Variant::kGathered) sums.sum[n][e % 2] += y[m][n][e];
        }
      }
    }
  } else {
    const int low = first_query + static_cast<int>(p.key_length - p.query_length);
    const LogitTerms<T> terms(p, batch, head);
    const Dropout dropout(p, batch, head);
    const int query_length = static_cast<int>(p.query_length), key_length = static_cast<int>(p.key_length);
    float* const grad_bias = row_of<float>(call.grad_bias, batch, head);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int tile_row = row + 16 * m + 8 * r, query = first_query + tile_row;
        const uint32_t row_key = dropout.is_on() ? dropout.row_key(query) : 0;
#pragma unroll
        for (int n = 0; n < kN; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int at = column + 8 * n + e, key = key_of(at);
            float &probability = x[m][n][2 * r + e], &gradient = y[m][n][2 * r + e];
            const float capped = terms.capped(probability);
            const float logit = capped + (p.key_bias.data ? stage.key_bias[at] : 0.0f) + terms.bias_at(query, key, query_length);
            const bool visible = !chunk.needs_test || is_visible(stage, chunk, tile_row, at, low);
            const float undropped = visible ? exp2_approx(logit * kLog2e - lse2[m][r]) : 0.0f;
            float kept = dropout.keep_scale;
            if (dropout.is_on() && !dropout_keeps(row_key, static_cast<uint32_t>(key), dropout.threshold)) kept = 0.0f;
            const float grad_logit = visible ? undropped * (gradient * kept - delta[m][r]) : 0.0f;
            sums.sum[n][e] += grad_logit;
            if (grad_bias && visible && query < query_length && key >= 0 && key < key_length) {
              atomicAdd(grad_bias + static_cast<int64_t>(query) * key_length + key, grad_logit);
            }
            gradient = grad_logit * terms.slope(capped);
            probability = undropped * kept;
          }
        }
      }
    }
  }
}

}  // namespace dmattn::cuda::sm80
