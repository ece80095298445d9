// What becomes of the scores of a row: all are written down, or those from the row's bound on, as candidates.
#pragma once

#include "../common/device.cuh"
#include "../common/visibility.cuh"
#include "query_rows.cuh"

namespace dmattn::cuda {

// The key that stands in a column: columns are keys, or the keys of the blocks in a sample.
template <bool kFindsCandidates>
__device__ __forceinline__ int key_of_column(const IndexCall& call, int column) {
  if (kFindsCandidates || call.sample.log2 == 0) return column;
  const int within = column & ((1 << call.log2_score_block) - 1);
  return sampled_block(column >> call.log2_score_block, call.sample.log2) << call.log2_score_block | within;
}

// No column before this one's has a later key.
template <bool kFindsCandidates>
__device__ __forceinline__ int least_key_from(const IndexCall& call, int column) {
  return kFindsCandidates ? column : column >> call.log2_score_block << (call.log2_score_block + call.sample.log2);
}

// The least number that is greater; NaN for infinity.
__device__ __forceinline__ float next_up(float x) {
  const int bits = __float_as_int(x + 0.0f);
  return __int_as_float(bits + (bits < 0 ? -1 : 1));
}

// A query's row of scores.
template <bool kFindsCandidates>
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
    bound =
        kFindsCandidates && is_real ? call.bounds[number] : IndexEntry{__int_as_float(0x7fc00000), 0};  // NaN: nothing is better
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

// The largest score of each block of `1 << log2_block` neighbouring columns, where the block's first column stands; -inf
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

// Which of the lane's scores of a row are equal to the bound or better: a bit for each.
template <int kColumns>
__device__ __forceinline__ uint32_t columns_from_bound(const IndexCall& call, const IndexEntry& bound,
                                                       const float (&x)[kColumns][2], int first) {
  const int log2_block = call.log2_score_block, own = first + static_cast<int>(threadIdx.x) % 4 * 2;
  const int first_place = first >> log2_block, last_place = (first + 8 * kColumns - 1) >> log2_block;
  const float least = last_place < bound.place ? next_up(bound.score) : bound.score;
  uint32_t kept = 0;
#pragma unroll
  for (int i = 0; i < 2 * kColumns; ++i) {
    if (x[i / 2][i % 2] >= least) kept |= 1u << i;
  }
  if (first_place < bound.place && bound.place <= last_place) {
#pragma unroll
    for (int i = 0; i < 2 * kColumns; ++i) {
      const int place = (own + 8 * (i / 2) + i % 2) >> log2_block;
      if (x[i / 2][i % 2] == bound.score && place < bound.place) kept &= ~(1u << i);
    }
  }
  return kept;
}

// The sum of `count` over the lanes of a row up to this one, and over all four.
__device__ __forceinline__ int sum_in_row(int count, int& total) {
  const int lane = threadIdx.x % 4;
  int sum = count;
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, step, 4);
    sum += lane >= step ? other : 0;
  }
  total = __shfl_sync(0xffffffffu, sum, 3, 4);
  return sum;
}

// Candidates on their way into memory: a warp collects those of its 16 rows in shared memory, [16, kRoom] entries, and writes
// them down together.
struct StagedCandidates {
  static constexpr int kRoom = 64, kBytes = 16 * kRoom * static_cast<int>(sizeof(IndexEntry));
  IndexEntry* staged;
  int64_t first_row;      // in this part
  int count[2] = {0, 0};  // of the lane's rows

  __device__ __forceinline__ StagedCandidates(IndexEntry* memory, int64_t row) : staged(memory), first_row(row) {}

  // Row lane / 4 + 8 r of the warp.
  template <int kColumns>
  __device__ __forceinline__ void add(const IndexCall& call, const IndexEntry& bound, int r, const float (&x)[kColumns][2],
                                      int first) {
    const int lane = threadIdx.x % 32;
    const uint32_t kept = columns_from_bound(call, bound, x, first);
    int total;
    const int sum = sum_in_row(__popc(kept), total);
    if (__any_sync(0xffffffffu, count[r] + total > kRoom)) flush(call);
    IndexEntry* to = staged + (lane / 4 + 8 * r) * kRoom + count[r] + sum - __popc(kept);
    int place = first + lane % 4 * 2;
    count[r] += total;
    if (kept == 0) return;
#pragma unroll
    for (int i = 0; i < 2 * kColumns; ++i) {
      if (kept >> i & 1) *to++ = {x[i / 2][i % 2], (place + 8 * (i / 2) + i % 2) >> call.log2_score_block};
    }
  }
  __device__ __forceinline__ void flush(const IndexCall& call) {
    __syncwarp();
    const int lane = threadIdx.x % 32;
    const int low = __shfl_sync(0xffffffffu, count[0], lane % 8 * 4), high = __shfl_sync(0xffffffffu, count[1], lane % 8 * 4);
    const int mine = lane < 8 ? low : lane < 16 ? high : 0;  // of row `lane`
    const int from = mine > 0 ? atomicAdd(call.counts + first_row + lane, mine) : 0;
    const int capacity = static_cast<int>(call.sample.capacity);
    for (int row = 0; row < 16; ++row) {
      const int entries = __shfl_sync(0xffffffffu, mine, row), at = __shfl_sync(0xffffffffu, from, row);
      float2* const to = reinterpret_cast<float2*>(call.candidates + (first_row + row) * capacity);
      for (int i = lane; i < entries && at + i < capacity; i += 32)
        to[at + i] = reinterpret_cast<float2*>(staged + row * kRoom)[i];
    }
    __syncwarp();
    count[0] = count[1] = 0;
  }
};

// The same at once, for kernels in which several warps share a row.
template <int kColumns>
__device__ __forceinline__ void add_candidates(const IndexCall& call, const ScoreRow<true>& row, const float (&x)[kColumns][2],
                                               int first) {
  const int lane = threadIdx.x % 32, own = first + lane % 4 * 2;
  const uint32_t kept = columns_from_bound(call, row.bound, x, first);
  int total, from = 0;
  const int sum = sum_in_row(__popc(kept), total);
  if (lane % 4 == 3 && total > 0) from = atomicAdd(call.counts + row.number, total);
  int at = __shfl_sync(0xffffffffu, from, 3, 4) + sum - __popc(kept);
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

// Makes scores of the weighted sums of a row's columns first + 8 n + lane % 4 * 2 + {0, 1}, -inf where a key does not compete,
// and the largest of a block of it. All lanes of a warp come here together.
template <int kColumns, bool kFindsCandidates>
__device__ __forceinline__ void finish_row(const IndexCall& call, const ScoreGroup& group, const ScoreRow<kFindsCandidates>& row,
                                           float (&x)[kColumns][2], int first) {
  const int own = first + static_cast<int>(threadIdx.x) % 4 * 2;
  const CompetingRows& in = row.in;
  const int least = least_key_from<kFindsCandidates>(call, first),
            most = least_key_from<kFindsCandidates>(call, first + 8 * kColumns);
  const bool all_are_in = !group.start && !group.end && most <= call.p.keys &&
                          ((least >= in.first && most <= in.end) || (least >= in.later && most <= in.later_end));
  if (group.slope != 0.0f) {
#pragma unroll
    for (int i = 0; i < 2 * kColumns; ++i) {
      const int key = key_of_column<kFindsCandidates>(call, own + 8 * (i / 2) + i % 2);
      const float distance = static_cast<float>((key << group.log2_width) - row.position) + group.middle;
      x[i / 2][i % 2] = fmaf(group.slope, distance, x[i / 2][i % 2]);
    }
  }
  if (!all_are_in) {
#pragma unroll
    for (int i = 0; i < 2 * kColumns; ++i) {
      const int key = key_of_column<kFindsCandidates>(call, own + 8 * (i / 2) + i % 2);
      bool is_in = (key >= in.first && key < in.end) || (key >= in.later && key < in.later_end);
      if (group.start) is_in = is_in && group.start[key] <= row.position;
      if (group.end) is_in = is_in && row.position < group.end[key];
      x[i / 2][i % 2] = is_in ? x[i / 2][i % 2] : negative_infinity();
    }
  }
  if (call.log2_score_block > 0) keep_largest(x, call.log2_score_block);
}

}  // namespace dmattn::cuda
