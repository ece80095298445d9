// What decoding kernels get: how the keys of each sequence are split, which splits a block has, and where blocks leave what they
// found. No torch.
//
// A split is added up from nothing, and splits are added up as a tree: in pairs, pairs in pairs, and so on. So
// the result does not depend on how many neighbouring splits a block takes, as long as that is a power of two, and blocks may
// follow the batch and the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../params.h"

namespace dmattn::cuda {

inline constexpr int kLeastSplitKeys = 128, kMostSplitKeys = 2048;
inline constexpr int kMostBlockSplits = 32;  // of one block
inline constexpr int kMostParts = (1 << 20) / kMostSplitKeys;
inline constexpr int kMostClusterParts = 16;

inline constexpr int kTileRows = 16;  // of blocks that form clusters

// Keys in a split, by the capacity of the cache and the rows of a key head alone: what else is in the batch must not change a
// sequence's sums. From 32 splits on, splits grow instead.
inline int split_keys_of(int64_t capacity, int rows) {
  constexpr int kEnoughSplits = 32;
  int64_t keys = rows <= kTileRows ? kLeastSplitKeys : 2 * kLeastSplitKeys;
  while (keys < kMostSplitKeys && keys * kEnoughSplits < capacity) keys *= 2;
  return static_cast<int>(keys);
}

struct DecodeCall {
  DecodeParams p;
  float scale = 0.0f;
  int group = 1;  // query heads of a key head
  int rows = 0;   // of a key head: query t of its group's head g is row t * group + g
  int split_keys = 0;
  int block_splits = 1;  // neighbouring splits of a block, a power of two
  int parts = 1;         // blocks for the keys of a sequence; each finds a part of the sums
  // The blocks of a sequence are a cluster and add their parts up themselves. Then there are at most kMostClusterParts parts and
  // kTileRows rows.
  bool is_cluster = false;
  // What blocks found, null when they need not leave it. A sum is of weights, relative to a maximum. Blocks whose keys begin
  // behind the length write nothing.
  float2* part_sums = nullptr;  // [B, Hkv, rows, parts]: maximum, sum
  float* part_out = nullptr;    // [B, Hkv, rows, parts, Dv]
};

// How many neighbouring splits a block takes, by shapes and the device; it changes no bits. All of them where that leaves a block
// for most multiprocessors; otherwise as many as leave the device two rounds of blocks. The blocks of a sequence are a cluster
// where there may be one, all clusters fit at once, and their blocks are short: those of a long cluster may share multiprocessors
// while others idle.
inline void group_splits(DecodeCall& call, int splits, int multiprocessors, bool may_be_cluster) {
  constexpr int kBlocksOfTwoRounds = 4, kMostKeysOfCluster = 512;
  const int64_t heads = call.p.batch * call.p.kv_heads;
  const auto parts_of = [&](int block_splits) { return (splits + block_splits - 1) / block_splits; };
  const bool takes_all = splits <= kMostBlockSplits && heads * 8 >= int64_t{multiprocessors} * 7;
  const int64_t least = takes_all ? 1 : int64_t{kBlocksOfTwoRounds} * multiprocessors;
  while (call.block_splits < kMostBlockSplits && call.block_splits < splits && heads * parts_of(2 * call.block_splits) >= least) {
    call.block_splits *= 2;
  }
  const auto fits_cluster = [&](int block_splits) {
    const int parts = parts_of(block_splits);
    return may_be_cluster && call.rows <= kTileRows && parts > 1 && parts <= kMostClusterParts &&
           heads * parts <= multiprocessors && block_splits * call.split_keys <= kMostKeysOfCluster;
  };
  for (int block_splits = call.block_splits; !call.is_cluster && block_splits < splits && block_splits <= kMostBlockSplits;
       block_splits *= 2) {
    if (fits_cluster(block_splits)) call.block_splits = block_splits, call.is_cluster = true;
  }
  call.parts = parts_of(call.block_splits);
}

// Adds up the parts: part_sums, part_out -> out, lse.
cudaError_t launch_merge_parts(const DecodeCall& call, cudaStream_t stream);

}  // namespace dmattn::cuda
