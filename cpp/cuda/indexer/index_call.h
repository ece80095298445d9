// The selection of keys by an indexer: the launches, and the memory between them.
//
// Tiles of queries are taken in parts that fit in a workspace. For each part one kernel computes all scores, [rows, blocks]
// floats, and another chooses in every row.
#pragma once

#include <cuda_runtime_api.h>

#include "../../params.h"

namespace dmattn::cuda {

inline constexpr int kIndexTileQueries = 64;
inline constexpr int64_t kIndexWorkspaceBytes = int64_t{1} << 27;

struct IndexCall {
  IndexTopKParams p;
  int64_t first_tile = 0, tiles = 0;  // of this part; tile t is tile t % tiles_per_group of the group t / tiles_per_group
  int64_t tiles_per_group = 0;
  float* scores = nullptr;   // [tiles * kIndexTileQueries, row_stride]
  int64_t row_stride = 0;    // in floats, a multiple of 4
  int log2_score_block = 0;  // rows of key that have one score: a block, as far as a warp has all of it
  int log2_fold = 0;         // scores of a block, the largest of which counts
};

// The keys of a warp, whose largest score it finds.
constexpr int log2_keys_of_warp(int64_t head_dim) { return head_dim > 128 ? 4 : 6; }

// How many scores a row has.
DMATTN_HOST_DEVICE static inline int64_t scores_of_row(const IndexTopKParams& p, int log2_score_block) {
  return (p.keys + (int64_t{1} << log2_score_block) - 1) >> log2_score_block;
}

cudaError_t launch_index_scores(const IndexCall& call, cudaStream_t stream);
cudaError_t launch_index_choice(const IndexCall& call, cudaStream_t stream);

}  // namespace dmattn::cuda
