// What both backward kernels do with a block of scores: products become probabilities and gradients of scores, element by
// element.
//
// Both are computed in place: scores holds products and then probabilities, grad_scores holds <dout, value> and then gradients
// of the scaled products, so that a thread never has four copies of its block.
#pragma once

#include "../calls.h"
#include "../common/logits.cuh"
#include "scheduler.cuh"

namespace dmattn::cuda::sm80 {

// Does the host choose this shared-memory budget on GPUs of this architecture? If not, the kernel is compiled to a trap. Code for
// 8.0 also runs on 8.6 and 8.9, and as PTX on later GPUs, so it has every budget.
constexpr bool is_chosen(SmemBudget smem_budget) {
#ifdef __CUDA_ARCH__
  constexpr int kArchitecture = __CUDA_ARCH__;
  if (kArchitecture == 860 || kArchitecture == 890 || kArchitecture / 100 == 12) return smem_budget != SmemBudget::kLarge;
  if (kArchitecture == 900 || kArchitecture / 100 == 10) return smem_budget != SmemBudget::kSmall;
#endif
  return smem_budget == SmemBudget::kLarge || smem_budget == SmemBudget::kSmall || smem_budget == SmemBudget::kAny;
}

// Is this a row that sees nothing, and whose query or grad_out is not finite? Not even a weight of 0 may be multiplied with
// those.
__device__ __forceinline__ bool is_bad_row(float lse, float delta) { return lse == -negative_infinity() && delta != delta; }

// Zeros in place of a row of a tile.
template <int kDim>
__device__ __forceinline__ void clear_row(void* tile, int row) {
  uint4* const pieces = reinterpret_cast<uint4*>(static_cast<uint8_t*>(tile) + row * Tile<kDim>::kRowBytes);
  for (int i = 0; i < Tile<kDim>::kChunks; ++i) pieces[i] = {0, 0, 0, 0};
}

// The width of a block of scores in shared memory.
template <int kKeys>
inline constexpr int kScoreWidth = kKeys < 64 ? 64 : kKeys;

// The gradient of key_bias: sums of the gradients of logits over the rows of a block, for each column. This thread's part of
// them.
template <int kN>
struct ColumnSums {
  float sum[kN][2];
  __device__ __forceinline__ ColumnSums() {
#pragma unroll
    for (int n = 0; n < kN; ++n) sum[n][0] = sum[n][1] = 0.0f;
  }
  template <int kM>
  __device__ __forceinline__ void add(const float (&grad_scores)[kM][kN][4]) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int m = 0; m < kM; ++m)
        sum[n][0] += grad_scores[m][n][0] + grad_scores[m][n][2], sum[n][1] += grad_scores[m][n][1] + grad_scores[m][n][3];
    }
  }
  // Calls add(column, sum over the warp's rows) once for each column.
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

// Where keys are gathered, for rows whose lse may be huge: products become the exponents of probabilities, in base 2. `first_row`
// is the place of the thread's first row in call.lse.
template <int kM, int kN>
__device__ __forceinline__ void to_exponents(float (&scores)[kM][kN][4], const BackwardCall& call, const float* key_bias,
                                             int64_t first_row, int column) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t row = first_row + 16 * m + 8 * r;
      const float lse = call.lse[row], lse_rest2 = call.lse_rest2[row];
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& element = scores[m][n][2 * r + e];
          element = probability_exponent(fmaf(element, call.scale, key_bias[column + 8 * n + e]), lse, lse_rest2);
        }
      }
    }
  }
}

// Products become probabilities and go to shared memory. Instances that take any logits need the products for the gradients, so
// to_gradients does it there. The work is cut into `total` parts, so that exponentials run beside the steps of the second
// product. `column` is that of the thread's first element in the block; lse2 belongs to its rows. are_exponents: to_exponents
// came first.
template <class T, class Traits, bool are_exponents, int kWidth, int kM, int kN>
__device__ __forceinline__ void put_probabilities(PairPlace<kWidth> place, float (&scores)[kM][kN][4], const float (&lse2)[kM][2],
                                                  float scale_2, const float* key_bias, int column, int part, int total) {
  if constexpr (Traits::kLogits == Logits::kAny) return;
  constexpr int kPairs = kM * 2 * kN;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    if (i < part * kPairs / total || i >= (part + 1) * kPairs / total) continue;
    const int m = i / (2 * kN), r = i / kN % 2, n = i % kN;
    float (&pair)[4] = scores[m][n];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& element = pair[2 * r + e];
      if constexpr (!are_exponents) {
        const float shift = Traits::kBias == Bias::kKey ? key_bias[column + 8 * n + e] * kLog2e - lse2[m][r] : -lse2[m][r];
        element = fmaf(element, scale_2, shift);
      }
      element = exp2_approx(element);
    }
    store_shared_4(place.at(m, r, n), Element<T>::narrow_pair(pair[2 * r], pair[2 * r + 1]));
  }
}

// scores holds probabilities. grad_scores becomes the gradients of the scaled products, which are those of the logits too.
template <int kM, int kN>
__device__ __forceinline__ void to_gradients(const float (&scores)[kM][kN][4], float (&grad_scores)[kM][kN][4],
                                             const float (&delta)[kM][2]) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) grad_scores[m][n][e] = scores[m][n][e] * (grad_scores[m][n][e] - delta[m][e / 2]);
    }
  }
}

// The same in instances that take any logits, where scores holds products and becomes probabilities.
template <class T, int kM, int kN, class Stage, class KeyOf>
__device__ __forceinline__ void to_gradients(float (&scores)[kM][kN][4], float (&grad_scores)[kM][kN][4],
                                             const float (&lse)[kM][2], const float (&lse_rest2)[kM][2],
                                             const float (&delta)[kM][2], ColumnSums<kN>& sums, const BackwardCall& call,
                                             int batch, int head, const Stage& stage, const Chunk& chunk, bool needs_test,
                                             int first_query, int row, int column, KeyOf key_of) {
  const AttentionParams& p = call.b.forward;
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
          float &probability = scores[m][n][2 * r + e], &gradient = grad_scores[m][n][2 * r + e];
          const float capped = terms.capped(probability);
          const float logit = capped + (p.key_bias.data ? stage.key_bias[at] : 0.0f) + terms.bias_at(query, key, query_length);
          const bool visible = !needs_test || is_visible(stage, chunk, tile_row, at, low);
          const float undropped = visible ? exp2_approx(probability_exponent(logit, lse[m][r], lse_rest2[m][r])) : 0.0f;
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

// to[32 keys, 8 kN] += scores^T * by: scores [kQueries, kWidth] from column key_row on, by [kQueries, kDim] from `column` on.
template <class T, int kQueries, int kWidth, int kDim, int kN, class Beside = Nothing>
__device__ __forceinline__ void accumulate(float (&to)[2][kN][4], uint32_t score_tile, int key_row, uint32_t by, int column,
                                           Beside beside = {}) {
  const auto transposed = Fragment<kWidth>::wide(score_tile, 0, key_row / 8);
  multiply_by_columns<T, kQueries / 16>(
      to, [&](int k, int m, uint32_t (&a)[4]) { load_matrix_transposed(a, transposed.step(16 * k, 2 * m)); },
      Fragment<kDim>::tall(by, 0, column / 8), beside);
}

// to[16 kM queries, 8 kN] += scores * keys: scores [queries, kWidth] from query_row on, keys [kKeys, kDim] from `column` on.
template <class T, int kKeys, int kWidth, int kDim, int kM, int kN, class Beside = Nothing>
__device__ __forceinline__ void accumulate_queries(float (&to)[kM][kN][4], uint32_t score_tile, int query_row, uint32_t keys,
                                                   int column, Beside beside = {}) {
  const auto rows = Fragment<kWidth>::tall(score_tile, query_row, 0);
  multiply_by_columns<T, kKeys / 16>(
      to, [&](int k, int m, uint32_t (&a)[4]) { load_matrix(a, rows.step(16 * m, 2 * k)); },
      Fragment<kDim>::tall(keys, 0, column / 8), beside);
}

// The rows of key_sums of the thread's keys, of which key_of(row) is the first; a key that does not exist has the spare row.
template <class KeyOf>
__device__ __forceinline__ void find_key_sums(const BackwardCall& call, int batch, int kv_head, int key_width, int value_width,
                                              int row, const KeyOf& key_of, float* (&key_rows)[2][2],
                                              float* (&value_rows)[2][2]) {
  const AttentionParams& p = call.b.forward;
  const uint64_t row_bytes = static_cast<uint32_t>(key_width + value_width) * 4;
  char* const first_row = reinterpret_cast<char*>(call.key_sums) + (batch * p.kv_heads + kv_head) * p.key_length * row_bytes;
  char* const no_row = reinterpret_cast<char*>(call.key_sums) + p.batch * p.kv_heads * p.key_length * row_bytes;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = key_of(row + 16 * m + 8 * r);
      const bool is_key = key >= 0 && key < p.key_length;
      key_rows[m][r] = reinterpret_cast<float*>(is_key ? first_row + static_cast<uint32_t>(key) * row_bytes : no_row);
      value_rows[m][r] = key_rows[m][r] + key_width;
    }
  }
}

}  // namespace dmattn::cuda::sm80
