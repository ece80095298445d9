// The selection of keys by an indexer: the launches, and the memory between them.
//
// Tiles of queries are taken in parts that fit in a workspace. Where rows are long, the scores of a sample of the blocks say
// above which bound the k best lie, for every row; a second pass over all keys writes down the scores above the bound alone, the
// candidates, and the k best of them are chosen. A row that has too few or too many candidates, which is very rare, is scored
// once more. Where rows are short, all their scores are written down.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>

#include "../../params.h"

namespace dmattn::cuda {

inline constexpr int kIndexTileQueries = 64;
inline constexpr int64_t kIndexWorkspaceBytes = int64_t{1} << 29;

struct IndexEntry {
  float score;
  int32_t place;  // of the block in its row
};

// One block of every 2^log2 neighbouring ones is in the sample, and the rank-th best of them is the bound.
struct IndexSample {
  int log2 = 0, rank = 0;  // log2 = 0: there is no sample, all scores are written down
  int64_t capacity = 0;    // candidates that a row has room for, a multiple of 32
};

struct IndexCall {
  IndexTopKParams p;
  int64_t first_tile = 0, tiles = 0;  // of this part; tile t is tile t % tiles_per_group of the group t / tiles_per_group
  int64_t tiles_per_group = 0;
  int processors = 0;        // multiprocessors of the device
  int log2_score_block = 0;  // rows of key that have one score: a block, as far as a warp has all of it
  int log2_fold = 0;         // scores of a block, the largest of which counts
  IndexSample sample;
  float* scores = nullptr;  // [tiles * kIndexTileQueries, row_stride]: of all blocks, or of the sample
  int64_t row_stride = 0;   // in floats, a multiple of 4
  // With a sample:
  IndexEntry* bounds = nullptr;      // [tiles * kIndexTileQueries]: candidates are equal to it or better
  int32_t* counts = nullptr;         // likewise: how many candidates were found, more than there is room for, too
  IndexEntry* candidates = nullptr;  // [tiles * kIndexTileQueries, capacity], in any order
};

// Whether a warp can keep 16 queries of all heads in registers.
inline constexpr int kFewIndexHeads = 4;
constexpr bool has_few_heads(int64_t heads, int64_t head_dim) { return heads <= kFewIndexHeads && head_dim <= 64; }

// The keys of a warp, whose largest score it finds.
constexpr int log2_keys_of_warp(int64_t heads, int64_t head_dim) {
  return has_few_heads(heads, head_dim) ? 5 : head_dim > 128 ? 4 : 6;
}

// How many scores a row has.
DMATTN_HOST_DEVICE static inline int64_t scores_of_row(const IndexTopKParams& p, int log2_score_block) {
  return (p.keys + (int64_t{1} << log2_score_block) - 1) >> log2_score_block;
}

// Which of the blocks of a group is in the sample: a hash, so that no period in the keys goes with it.
DMATTN_HOST_DEVICE static inline int32_t sampled_block(int32_t group, int log2_sample) {
  return static_cast<int32_t>((static_cast<uint32_t>(group) << log2_sample) +
                              (mix32(static_cast<uint32_t>(group)) & ((1u << log2_sample) - 1)));
}

// The sample that makes the least work of the choice of `top` of `blocks`. By Bernstein's inequality a sum of independent
// numbers, each 0 or 1, exceeds its mean m by x with a chance of at most exp(-x^2 / (2 m + 2 x / 3)), and falls short of it with
// one of at most exp(-x^2 / (2 m)); both are 1e-8 here. The first sum is how many of the `top` best are in the sample, the second
// how many of `capacity` are. Whatever the scores are, few rows have too few or too many candidates.
// `products` is the number of multiplications in the score of a block. `work` estimates time; its factors were fitted to what an
// H200 took.
inline IndexSample plan_sample(int64_t blocks, int64_t top, int64_t products) {
  constexpr double kTwice = 2.0 * 18.42;  // of the logarithm of the chance
  const double scoring = 4e-4 * static_cast<double>(products) + 0.6;
  IndexSample best;
  double least = 0.75 * static_cast<double>(blocks);
  for (int log2 = 2; log2 < 8; ++log2) {
    const double share = 1.0 / (1 << log2), mean = static_cast<double>(top) * share, all = static_cast<double>(blocks);
    const double rank = std::ceil(mean + kTwice / 6.0 + std::sqrt(kTwice * kTwice / 36.0 + kTwice * mean)) + 1.0;
    const double capacity = (rank + kTwice / 2.0 + std::sqrt(kTwice * kTwice / 4.0 + kTwice * rank)) / share;
    const double work = scoring * all * share + 0.5 * rank / share + 0.5 * capacity;
    if (work >= least || capacity >= all) continue;
    least = work;
    best = {log2, static_cast<int>(rank), (static_cast<int64_t>(capacity) + 31) / 32 * 32};
  }
  return best;
}

cudaError_t launch_few_heads(const IndexCall& call, bool finds_candidates, cudaStream_t stream);
cudaError_t launch_index_scores(const IndexCall& call, cudaStream_t stream);  // of all blocks, or of the sample
cudaError_t launch_index_bounds(const IndexCall& call, cudaStream_t stream);  // sets counts to 0, too
cudaError_t launch_index_candidates(const IndexCall& call, cudaStream_t stream);
cudaError_t launch_index_choice(const IndexCall& call, cudaStream_t stream);

}  // namespace dmattn::cuda
