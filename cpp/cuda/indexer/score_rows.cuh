// What becomes of the scores of a row: they are written down, or those that are not behind the row's bound are, as candidates.
#pragma once

#include "../common/device.cuh"
#include "../common/visibility.cuh"
#include "query_rows.cuh"

namespace dmattn::cuda {

// The key that stands in a column: columns are keys, or the keys of the blocks in a sample.
template <bool kKeepsBest>
__device__ __forceinline__ int key_of_column(const IndexCall& call, int column) {
  if (kKeepsBest || call.sample.log2 == 0) return column;
  const int within = column & ((1 << call.log2_score_block) - 1);
  return sampled_block(column >> call.log2_score_block, call.sample.log2) << call.log2_score_block | within;
}

// No column before this one's has a later key.
template <bool kKeepsBest>
__device__ __forceinline__ int least_key_from(const IndexCall& call, int column) {
  return kKeepsBest ? column : column >> call.log2_score_block << (call.log2_score_block + call.sample.log2);
}

// A query's row of scores.
template <bool kKeepsBest>
struct ScoreRow {
  int position;
  bool is_real;
  int64_t number;  // in this part
  CompetingRows in;
  IndexEntry bound;

  // Row `row` of tile `tile_of_part`, of which `rows` are queries.
  __device__ __forceinline__ ScoreRow(const IndexCall& call, const IndexQueries& at, int tile_of_part, int row, int rows)
      : position(static_cast<int>(at.offset + at.first) + row),
        is_real(row < rows),
        number(static_cast<int64_t>(tile_of_part) * kIndexTileQueries + row),
        in(competing_rows(call.p, at.offset + at.first + row, at.length)) {
    if (kKeepsBest && is_real) bound = call.bounds[number];
  }
};

// What all rows of a group share.
struct ScoreGroup {
  float slope, middle;
  int log2_width;  // keys in a row of key
  const int32_t *start, *end;

  __device__ __forceinline__ ScoreGroup(const IndexTopKParams& p, const IndexQueries& at)
      : slope(p.slope ? static_cast<const float*>(p.slope)[at.group] : 0.0f),
        log2_width(p.is_pooled ? p.log2_block : 0),
        start(row_of<const int32_t>(p.start, at.batch, at.group)),
        end(row_of<const int32_t>(p.end, at.batch, at.group)) {
    middle = static_cast<float>((1 << log2_width) - 1) * 0.5f;
  }
};

// The largest of each `1 << log2_block` neighbouring columns, in x[n][0] of the lane and the n that are written(n); -inf
// elsewhere.
template <int kColumns>
__device__ __forceinline__ void keep_largest(float (&x)[kColumns][2], int log2_block) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    float best = fmaxf(x[n][0], x[n][1]);
    if (log2_block > 1) best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 1));
    if (log2_block > 2) best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2));
    x[n][0] = best, x[n][1] = negative_infinity();
  }
  // Of blocks of more than 8 keys the first column's place gets the largest of all.
#pragma unroll
  for (int step = 1; step < kColumns; step *= 2) {
    if (log2_block < 4 || (8 << (log2_block - 4)) < 8 * step) continue;
#pragma unroll
    for (int n = 0; n + step < kColumns; n += 2 * step) x[n][0] = fmaxf(x[n][0], x[n + step][0]);
  }
  const int columns = log2_block > 3 ? 1 << (log2_block - 3) : 1;  // of 8 keys to a block
  const bool writes = log2_block == 1 || (log2_block == 2 ? lane % 2 : lane % 4) == 0;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    if (!writes || n % columns != 0) x[n][0] = negative_infinity();
  }
}

// Writes down the scores of the columns from `first` on; blocks lie in one warp. All have a place, also those that do not
// compete.
template <int kColumns>
__device__ __forceinline__ void store_scores(const IndexCall& call, const float (&x)[kColumns][2], float* to, int first) {
  const int lane = threadIdx.x % 32, log2_block = call.log2_score_block, own = first + lane % 4 * 2;
  const int columns = log2_block > 3 ? 1 << (log2_block - 3) : 1;
  const bool writes = log2_block < 2 || (log2_block == 2 ? lane % 2 : lane % 4) == 0;
  const int64_t end = call.row_stride << log2_block;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    const int column = own + 8 * n;
    if (column >= end) continue;
    if (log2_block == 0) {
      *reinterpret_cast<float2*>(to + column) = {x[n][0], x[n][1]};
    } else if (writes && n % columns == 0) {
      to[column >> log2_block] = x[n][0];
    }
  }
}

// Adds those of the scores that are not behind the bound to the row's candidates.
template <int kColumns>
__device__ __forceinline__ void add_candidates(const IndexCall& call, const ScoreRow<true>& row, const float (&x)[kColumns][2],
                                               int first) {
  const int lane = threadIdx.x % 32, own = first + lane % 4 * 2;
  uint32_t kept = 0;
#pragma unroll
  for (int i = 0; i < 2 * kColumns; ++i) {
    const float score = x[i / 2][i % 2];
    const int place = (own + 8 * (i / 2) + i % 2) >> call.log2_score_block;
    if (score >= row.bound.score && (score > row.bound.score || place >= row.bound.place)) kept |= 1u << i;
  }
  if (!row.is_real) kept = 0;
  const int count = __popc(kept);
  int sum = count;  // over the lanes of the row up to this one
  const int one = __shfl_up_sync(0xffffffffu, sum, 1, 4);
  sum += lane % 4 >= 1 ? one : 0;
  const int two = __shfl_up_sync(0xffffffffu, sum, 2, 4);
  sum += lane % 4 >= 2 ? two : 0;
  int from = 0;
  if (lane % 4 == 3 && sum > 0) from = atomicAdd(call.counts + row.number, sum);
  int at = __shfl_sync(0xffffffffu, from, 3, 4) + sum - count;
  const int capacity = static_cast<int>(call.sample.capacity);
  IndexEntry* const to = call.candidates + row.number * capacity;
#pragma unroll
  for (int i = 0; i < 2 * kColumns; ++i) {
    if (!(kept >> i & 1)) continue;
    const int place = (own + 8 * (i / 2) + i % 2) >> call.log2_score_block;
    if (at < capacity) *reinterpret_cast<float2*>(to + at) = {x[i / 2][i % 2], __int_as_float(place)};
    ++at;
  }
}

// x: the weighted sums of a row's columns first + 8 n + lane % 4 * 2 + {0, 1}. All lanes of a warp come here together.
template <int kColumns, bool kKeepsBest>
__device__ __forceinline__ void finish_row(const IndexCall& call, const ScoreGroup& group, const ScoreRow<kKeepsBest>& row,
                                           float (&x)[kColumns][2], int first) {
  const int own = first + static_cast<int>(threadIdx.x) % 4 * 2;
  const CompetingRows& in = row.in;
  const int last = first + 8 * kColumns;
  const bool all_are_in = kKeepsBest && !group.start && !group.end &&
                          ((first >= in.first && last <= in.end) || (first >= in.later && last <= in.later_end));
#pragma unroll
  for (int i = 0; i < 2 * kColumns; ++i) {
    const int key = key_of_column<kKeepsBest>(call, own + 8 * (i / 2) + i % 2);
    const float distance = static_cast<float>((key << group.log2_width) - row.position) + group.middle;
    x[i / 2][i % 2] = fmaf(group.slope, distance, x[i / 2][i % 2]);
  }
  if (!all_are_in) {
#pragma unroll
    for (int i = 0; i < 2 * kColumns; ++i) {
      const int key = key_of_column<kKeepsBest>(call, own + 8 * (i / 2) + i % 2);
      bool is_in = (key >= in.first && key < in.end) || (key >= in.later && key < in.later_end);
      if (group.start) is_in = is_in && group.start[key] <= row.position;
      if (group.end) is_in = is_in && row.position < group.end[key];
      const float score = x[i / 2][i % 2];
      x[i / 2][i % 2] = is_in && score > negative_infinity() ? score : negative_infinity();
    }
  }
  if (call.log2_score_block > 0) keep_largest(x, call.log2_score_block);
  if constexpr (kKeepsBest) {
    add_candidates(call, row, x, first);
  } else if (row.is_real) {
    store_scores(call, x, call.scores + row.number * call.row_stride, first);
  }
}

}  // namespace dmattn::cuda
