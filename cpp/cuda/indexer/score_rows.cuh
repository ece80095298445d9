// What becomes of the scores of a row: all are written down, or those from the row's bound on, as candidates.
#pragma once

#include "../common/dependent_launch.cuh"
#include "../common/device.cuh"
#include "../common/visibility.cuh"
#include "query_rows.cuh"

namespace dmattn::cuda {

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

// Sets every kEach-th first score to the largest of itself and those of the neighbouring lanes that have the same block.
template <int kEach, int kColumns>
__device__ __forceinline__ void largest_of_lanes(float (&x)[kColumns][2], int log2_block) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    if (2 * step >= 1 << log2_block) return;
#pragma unroll
    for (int n = 0; n < kColumns; n += kEach) x[n][0] = fmaxf(x[n][0], __shfl_xor_sync(0xffffffffu, x[n][0], step));
  }
}

// The largest score of each block of `1 << log2_block` neighbouring columns, where the block's first column stands; -inf
// elsewhere.
template <int kColumns>
__device__ __forceinline__ void keep_largest(float (&x)[kColumns][2], int log2_block) {
  const int lane = threadIdx.x % 32;
  const int columns = log2_block > 3 ? 1 << (log2_block - 3) : 1;  // of 8 keys to a block
#pragma unroll
  for (int n = 0; n < kColumns; ++n) x[n][0] = fmaxf(x[n][0], x[n][1]), x[n][1] = negative_infinity();
#pragma unroll
  for (int step = 1; step < kColumns; step *= 2) {
    if (step >= columns) break;
#pragma unroll
    for (int n = 0; n + step < kColumns; n += 2 * step) x[n][0] = fmaxf(x[n][0], x[n + step][0]);
  }
  if (columns == 1) {
    largest_of_lanes<1>(x, log2_block);
  } else if (columns == 2) {
    largest_of_lanes<2>(x, log2_block);
  } else if (columns == 4) {
    largest_of_lanes<4>(x, log2_block);
  } else {
    largest_of_lanes<8>(x, log2_block);
  }
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

// From which score on a lane's two rows have candidates: from `score` on in columns from `edge` on, above it in earlier ones.
struct Bounds {
  float score[2], above[2];
  int edge[2];

  template <bool kFindsCandidates>
  __device__ __forceinline__ explicit Bounds(const IndexCall& call, const ScoreRow<kFindsCandidates> (&rows)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      score[r] = rows[r].bound.score, above[r] = next_up(score[r]), edge[r] = rows[r].bound.place << call.log2_score_block;
      asm volatile("" : "+f"(above[r]), "+r"(edge[r]));  // not to be computed again
    }
  }
  // Sets `least` for so many columns; returns whether a row's edge is among them.
  __device__ __forceinline__ bool least_of(int column, int count, float (&least)[2]) const {
    bool has_edge = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int before = edge[r] - column;
      least[r] = before >= count ? above[r] : score[r];
      has_edge = has_edge | (static_cast<uint32_t>(before - 1) < static_cast<uint32_t>(count - 1));
    }
    return __any_sync(0xffffffffu, has_edge);
  }
  // Takes scores equal to the bound in front of the edge out.
  template <int kColumns>
  __device__ __forceinline__ void drop_equal(float (&x)[2][kColumns][2], int own) const {
#pragma unroll
    for (int i = 0; i < 4 * kColumns; ++i) {
      const int r = i % 2, n = i / 4, e = i / 2 % 2;
      if (x[r][n][e] == score[r] && own + 8 * n + e < edge[r]) x[r][n][e] = negative_infinity();
    }
  }
};

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

// Writes down the candidates among the scores of two rows.
template <int kColumns>
__device__ __forceinline__ void add_candidates(const IndexCall& call, const ScoreRow<true> (&rows)[2], float (&x)[2][kColumns][2],
                                               int first) {
  const int lane = threadIdx.x % 32, own = first + lane % 4 * 2;
  const Bounds bounds(call, rows);
  float least[2];
  if (bounds.least_of(first, 8 * kColumns, least)) bounds.drop_equal(x, own);
  const int capacity = static_cast<int>(call.sample.capacity);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    int kept = 0;
#pragma unroll
    for (int i = 0; i < 2 * kColumns; ++i) kept += x[r][i / 2][i % 2] >= least[r];
    int total, from = 0;
    const int sum = sum_in_row(kept, total);
    if (lane % 4 == 3 && total > 0) from = atomicAdd(call.counts + rows[r].number, total);
    int at = __shfl_sync(0xffffffffu, from, 3, 4) + sum - kept;
    IndexEntry* const to = call.candidates + rows[r].number * capacity;
#pragma unroll
    for (int i = 0; i < 2 * kColumns; ++i) {
      if (!(x[r][i / 2][i % 2] >= least[r])) continue;
      const int place = (own + 8 * (i / 2) + i % 2) >> call.log2_score_block;
      if (at < capacity) *reinterpret_cast<float2*>(to + at) = {x[r][i / 2][i % 2], __int_as_float(place)};
      ++at;
    }
  }
}

// The keys that compete for all queries of a warp: two ranges, or none.
template <bool kFindsCandidates>
struct CommonKeys {
  int first, end, later, later_end;

  __device__ __forceinline__ CommonKeys(const IndexCall& call, const ScoreGroup& group,
                                        const ScoreRow<kFindsCandidates> (&rows)[2])
      : first(0), end(static_cast<int>(call.p.keys)), later(0), later_end(end) {
    if (group.start || group.end) end = later_end = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!rows[r].is_real) continue;
      first = max(first, rows[r].in.first), end = min(end, rows[r].in.end);
      later = max(later, rows[r].in.later), later_end = min(later_end, rows[r].in.later_end);
    }
    first = __reduce_max_sync(0xffffffffu, first), end = __reduce_min_sync(0xffffffffu, end);
    later = __reduce_max_sync(0xffffffffu, later), later_end = __reduce_min_sync(0xffffffffu, later_end);
  }
  // Are all keys of so many columns among them?
  __device__ __forceinline__ bool hold(const IndexCall& call, int column, int count) const {
    const int least = least_key_from<kFindsCandidates>(call, column),
              most = least_key_from<kFindsCandidates>(call, column + count);
    return ((least >= first) & (most <= end)) | ((least >= later) & (most <= later_end));
  }
};

// Adds the slope times the distance to the scores of two rows' columns first + 8 n + lane % 4 * 2 + {0, 1}.
template <int kColumns, bool kFindsCandidates>
__device__ __forceinline__ void add_distances(const IndexCall& call, const ScoreGroup& group,
                                              const ScoreRow<kFindsCandidates> (&rows)[2], float (&x)[2][kColumns][2],
                                              int first) {
  const int own = first + static_cast<int>(threadIdx.x) % 4 * 2;
  const float between = static_cast<float>(rows[1].position - rows[0].position);
  const float base = static_cast<float>((own << group.log2_width) - rows[0].position) + group.middle;
  const float width = static_cast<float>(1 << group.log2_width);
#pragma unroll
  for (int i = 0; i < 2 * kColumns; ++i) {
    const int column = 8 * (i / 2) + i % 2;
    float distance = fmaf(width, static_cast<float>(column), base);  // exact below 2^23
    if (!kFindsCandidates && call.sample.log2 > 0) {
      const int key = key_of_column<kFindsCandidates>(call, own + column);
      distance = static_cast<float>((key << group.log2_width) - rows[0].position) + group.middle;
    }
    x[0][i / 2][i % 2] = fmaf(group.slope, distance, x[0][i / 2][i % 2]);
    x[1][i / 2][i % 2] = fmaf(group.slope, distance - between, x[1][i / 2][i % 2]);
  }
}

// Makes -inf of the scores of keys that do not compete.
template <int kColumns, bool kFindsCandidates>
__device__ __forceinline__ void hide_others(const IndexCall& call, const ScoreGroup& group, const ScoreRow<kFindsCandidates>& row,
                                            float (&x)[kColumns][2], int first) {
  const int own = first + static_cast<int>(threadIdx.x) % 4 * 2;
  const CompetingRows& in = row.in;
#pragma unroll
  for (int i = 0; i < 2 * kColumns; ++i) {
    const int key = key_of_column<kFindsCandidates>(call, own + 8 * (i / 2) + i % 2);
    bool is_in = (key >= in.first && key < in.end) || (key >= in.later && key < in.later_end);
    if (group.start) is_in = is_in && group.start[key] <= row.position;
    if (group.end) is_in = is_in && row.position < group.end[key];
    x[i / 2][i % 2] = is_in ? x[i / 2][i % 2] : negative_infinity();
  }
}

// Makes scores of the weighted sums of two rows' columns first + 8 n + lane % 4 * 2 + {0, 1}, -inf where a key does not compete,
// and the largest of a block of it. All lanes of a warp come here together.
template <int kColumns, bool kFindsCandidates>
__device__ __forceinline__ void finish_rows(const IndexCall& call, const ScoreGroup& group,
                                            const ScoreRow<kFindsCandidates> (&rows)[2], float (&x)[2][kColumns][2], int first,
                                            bool all_are_in) {
  if (group.slope != 0.0f) add_distances(call, group, rows, x, first);
  if (!all_are_in) {
#pragma unroll
    for (int r = 0; r < 2; ++r) hide_others(call, group, rows[r], x[r], first);
  }
  if (call.log2_score_block > 0) {
#pragma unroll
    for (int r = 0; r < 2; ++r) keep_largest(x[r], call.log2_score_block);
  }
}

// Launches a kernel of scores. One that finds candidates follows the choice of bounds closely. One that does not may follow the
// kernel that wrote its inputs, which it reads as what nobody writes any more: it begins when that has ended.
template <bool kFindsCandidates>
cudaError_t launch_scoring(void (*kernel)(IndexCall), dim3 grid, unsigned threads, size_t shared_bytes, cudaStream_t stream,
                           const IndexCall& call) {
  if (kFindsCandidates) return launch_dependent(kernel, grid, threads, shared_bytes, stream, call);
  kernel<<<grid, threads, shared_bytes, stream>>>(call);
  return cudaGetLastError();
}

}  // namespace dmattn::cuda
