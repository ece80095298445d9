// The slots of one key head of a bounded cache, and how a block copies rows among them.
//
// A thread copies the same 16 bytes of every row, and one thread all scores and positions. So rows that are copied one after
// another need no barrier between them.
#pragma once

#include "../../cache_step.h"
#include "device.cuh"

namespace dmattn::cuda {

inline constexpr int kPieceBytes = 16;

using Worst = Competitor<float>;

__device__ __forceinline__ int pieces_of(int64_t width) { return static_cast<int>(width) * 2 / kPieceBytes; }

__device__ __forceinline__ const uint4* row_of_chunk(const TensorView& rows, int batch, int head, int row) {
  const int64_t at = batch * rows.batch_stride + head * rows.head_stride + row * rows.row_stride;
  return reinterpret_cast<const uint4*>(static_cast<const char*>(rows.data) + at * 2);
}

// The score of a new token.
__device__ __forceinline__ float new_score(const CacheParams& p, int batch, int head, int token = 0) {
  if (!p.new_scores.data) return 0.0f;
  const int64_t at = batch * p.new_scores.batch_stride + head * p.new_scores.head_stride + token;
  if (p.scores_dtype == DType::kFloat32) return static_cast<const float*>(p.new_scores.data)[at];
  if (p.scores_dtype == DType::kBFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p.new_scores.data)[at]);
  return __half2float(static_cast<const __half*>(p.new_scores.data)[at]);
}

// The slots of one key head.
struct Slots {
  const CacheParams& p;
  int task, batch, head, step, thread, key_pieces, value_pieces;
  uint4 *key, *value;
  float* score;
  int32_t *position, *entered;
  bool writes_numbers;

  __device__ __forceinline__ Slots(const CacheParams& params, int index) : p(params), task(index) {
    batch = task / static_cast<int>(p.kv_heads), head = task % static_cast<int>(p.kv_heads);
    thread = static_cast<int>(threadIdx.x);
    key_pieces = pieces_of(p.head_dim), value_pieces = pieces_of(p.value_dim);
    const int64_t first = static_cast<int64_t>(task) * p.slots;
    key = static_cast<uint4*>(p.key) + first * key_pieces, value = static_cast<uint4*>(p.value) + first * value_pieces;
    score = static_cast<float*>(p.score) + first, position = p.position + first;
    entered = p.entered + static_cast<int64_t>(task) * p.rewind;
    step = p.steps[task];
    writes_numbers = thread == static_cast<int>(blockDim.x) - 1;
  }

  // All threads know it before one of them writes another.
  __device__ __forceinline__ int32_t entered_of(int32_t row) const {
    const int32_t slot = entered[row];
    __syncthreads();
    return slot;
  }
  __device__ __forceinline__ void set_entered(int32_t row, int32_t slot) {
    if (writes_numbers) entered[row] = slot;
  }

  // A row of this cache, or an empty one.
  __device__ __forceinline__ void copy(int32_t row, int32_t slot) {
    const bool is_empty = row == kEmptyRow;
    const int64_t from = is_empty ? 0 : row, to = slot;
    if (thread < key_pieces) {
      key[to * key_pieces + thread] = is_empty ? uint4{} : key[from * key_pieces + thread];
    } else if (thread < key_pieces + value_pieces) {
      const int piece = thread - key_pieces;
      value[to * value_pieces + piece] = is_empty ? uint4{} : value[from * value_pieces + piece];
    }
    if (writes_numbers) {
      const float found = is_empty ? negative_infinity() : score[from];
      const int32_t at = is_empty ? kNoPosition : position[from];
      score[to] = found, position[to] = at;
    }
  }
};

// The worst of what the lanes of a warp found; all lanes get it. Scores are no NaN.
__device__ __forceinline__ Worst worst_of_warp(Worst found) {
  // Floats as integers in the same order; -0 equals 0.
  const int32_t bits = __float_as_int(found.score + 0.0f), ordered = bits >= 0 ? bits : bits ^ 0x7fffffff;
  const int32_t least = __reduce_min_sync(~0u, ordered);
  bool is_worst = ordered == least;
  const int32_t position = __reduce_min_sync(~0u, is_worst ? found.position : 0x7fffffff);
  is_worst = is_worst && found.position == position;
  const int32_t slot = __reduce_min_sync(~0u, is_worst ? found.slot : 0x7fffffff);
  return {__int_as_float(least >= 0 ? least : least ^ 0x7fffffff), position, slot};
}

// Better than every key. Its slot is one that there is: scores that are all NaN, by a wrong state, leave nothing else.
__device__ __forceinline__ Worst none_is_worst(const CacheParams& p) { return {INFINITY, 0x7fffffff, first_selected_slot(p)}; }

}  // namespace dmattn::cuda
