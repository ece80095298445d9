// What the kernels of scores read: which keys, and their rows in shared memory.
#pragma once

#include "../common/visibility.cuh"
#include "../sm80/tile.cuh"
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

// The columns of a row: all keys, or those of a sample.
template <bool kFindsCandidates>
int64_t columns_of(const IndexCall& call) {
  if (kFindsCandidates || call.sample.log2 == 0) return call.p.keys;
  const int64_t blocks = scores_of_row(call.p, call.log2_score_block);
  return ((blocks + (int64_t{1} << call.sample.log2) - 1) >> call.sample.log2) << call.log2_score_block;
}

// The keys of columns first_column .. + kKeys - 1.
template <int kWidth, int kKeys, int kThreads, bool kFindsCandidates>
__device__ __forceinline__ void copy_index_keys(const IndexCall& call, const IndexQueries& at, uint32_t tile, int first_column) {
  const IndexTopKParams& p = call.p;
  const char* const from = sm80::rows_of_head(p.key, at.batch, at.group);
  const sm80::RowCopy<kWidth, kThreads> copy(static_cast<int>(p.head_dim));
#pragma unroll 4
  for (int r = 0; r < kKeys; r += copy.kRows) {
    const int key = key_of_column<kFindsCandidates>(call, first_column + copy.row + r);
    const bool wanted = key < p.keys;
    copy.start(tile, r, from + (wanted ? key : 0) * p.key.row_stride * 2, wanted);
  }
}

// Not fmaxf, which would make 0 of NaN.
__device__ __forceinline__ float positive(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace dmattn::cuda
