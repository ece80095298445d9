// What decoding kernels get: how the keys of each sequence are split, which splits a block has, and where blocks leave what they
// found. No torch.
//
// A split is added up from nothing, and splits are added up as a tree: in pairs, pairs in pairs, and so on. So the result does
// not depend on how many neighbouring splits a block takes, as long as that is a power of two, and blocks may follow the batch
// and the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../params.h"

namespace dmattn::cuda {

inline constexpr int kLeastSplitKeys = 128, kMostSplitKeys = 2048;
inline constexpr int kMostBlockSplits = 32;  // of one block
inline constexpr int kMostParts = (1 << 20) / kMostSplitKeys;
inline constexpr int kMostClusterParts = 16;

inline constexpr int kMostFewRows = 16;  // up to so many rows of a key head are one tile; blocks of more form no clusters
inline constexpr int kLightRows = 8;     // up to so many rows a block of its own keeps up with memory

// Keys in a split, by the capacity of the cache and the rows of a key head alone: what else is in the batch must not change a
// sequence's sums. From 32 splits on, splits grow instead.
inline int split_keys_of(int64_t capacity, int rows) {
  constexpr int kEnoughSplits = 32;
  int64_t keys = rows <= kMostFewRows ? kLeastSplitKeys : 2 * kLeastSplitKeys;
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
  // kMostFewRows rows.
  bool is_cluster = false;
  // What blocks found, null when they need not leave it. A sum is of weights, relative to a maximum. Blocks whose keys begin
  // behind the length write nothing.
  float2* part_sums = nullptr;  // [B, Hkv, rows, parts]: maximum, sum
  float* part_out = nullptr;    // [B, Hkv, rows, parts, Dv]
};

// Whether the blocks of a sequence are a cluster, where there may be one: all clusters fit at once, and most multiprocessors have
// a block, unless the cluster is the largest possible one. Its blocks are short, because those of a long cluster of many may
// share multiprocessors while others idle, and because a block alone is slow where there is much to compute. Where there are
// about as many heads as multiprocessors, pairs of blocks fit at once, too, and keep more bytes on their way than single blocks.
inline bool fits_cluster(const DecodeCall& call, int block_splits, int splits, int multiprocessors) {
  constexpr int kShortKeys = 512, kFewParts = 4;
  const auto parts_of = [&](int of_block) { return (splits + of_block - 1) / of_block; };
  const int64_t heads = call.p.batch * call.p.kv_heads,
                width = call.p.head_dim > call.p.value_dim ? call.p.head_dim : call.p.value_dim;
  const int parts = parts_of(block_splits);
  const bool is_pair = parts == 2 && heads * 8 >= int64_t{multiprocessors} * 7;
  if (call.rows > kMostFewRows || parts < 2 || parts > kMostClusterParts) return false;
  if (heads * parts > int64_t{multiprocessors} * (is_pair ? 2 : 1)) return false;
  const bool is_largest = block_splits == 1 || parts_of(block_splits / 2) > kMostClusterParts;
  if (!is_largest && 2 * heads * parts < multiprocessors) return false;
  const bool is_light = call.rows <= kLightRows && width > 64 && width <= 128;
  return block_splits * call.split_keys <= kShortKeys || (is_light && parts <= kFewParts);
}

// How many neighbouring splits a block takes, by shapes and the device; it changes no bits. All of them where that leaves a block
// for most multiprocessors; otherwise as many as a cluster needs where there may be one; otherwise as many as leave the device
// enough blocks.
inline void group_splits(DecodeCall& call, int splits, int multiprocessors, bool may_be_cluster) {
  const int64_t heads = call.p.batch * call.p.kv_heads;
  const auto parts_of = [&](int of_block) { return (splits + of_block - 1) / of_block; };
  const bool takes_all = splits <= kMostBlockSplits && heads * 8 >= int64_t{multiprocessors} * 7;
  // Two blocks fit a multiprocessor: one round of them, or two where there is much to compute.
  const int64_t least = takes_all                 ? 1
                        : call.rows <= kLightRows ? int64_t{multiprocessors} * 19 / 10
                                                  : int64_t{multiprocessors} * 4;
  const int most = takes_all ? kMostBlockSplits : kMostBlockSplits / 2;
  while (call.block_splits < most && call.block_splits < splits && heads * parts_of(2 * call.block_splits) >= least) {
    call.block_splits *= 2;
  }
  const int fewest = takes_all && call.block_splits > 1 ? call.block_splits / 2 : call.block_splits;
  for (int block_splits = fewest; may_be_cluster && !call.is_cluster && block_splits <= kMostBlockSplits; block_splits *= 2) {
    if (fits_cluster(call, block_splits, splits, multiprocessors)) call.block_splits = block_splits, call.is_cluster = true;
  }
  call.parts = parts_of(call.block_splits);
}

// Adds up the parts: part_sums, part_out -> out, lse.
cudaError_t launch_merge_parts(const DecodeCall& call, cudaStream_t stream);

}  // namespace dmattn::cuda
