// What decoding kernels get: how the keys of each sequence are split, which splits a block has, and where blocks leave what they
// found. No torch.
//
// The one surprise is a tree. A split is added up from nothing, and splits are added up in pairs, pairs in pairs, and so on. So
// the result does not depend on how many neighbouring splits a block takes, as long as that is a power of two, and blocks may
// follow the batch and the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../params.h"

namespace dmattn::cuda {

inline constexpr int kLeastSplitKeys = 128, kMostSplitKeys = 2048;
inline constexpr int kMostBlockSplits = 16;  // of one block
inline constexpr int kMostParts = (1 << 20) / kMostSplitKeys;
inline constexpr int kMostClusterParts = 16;

// Keys in a split, by the capacity of the cache and the rows of a key head alone: what else is in the batch must not change a
// sequence's sums. From 32 splits on, splits grow instead.
inline int split_keys_of(int64_t capacity, int rows) {
  constexpr int kEnoughSplits = 32, kFewRows = 16;
  int64_t keys = rows <= kFewRows ? kLeastSplitKeys : 2 * kLeastSplitKeys;
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
  // The blocks of a sequence are a cluster and add their parts up themselves. Then `parts` is a power of two up to
  // kMostClusterParts, and there are at most 16 rows.
  bool is_cluster = false;
  // What blocks found, null when they need not leave it. A sum is of weights, relative to a maximum. Blocks whose keys begin
  // behind the length write nothing.
  float2* part_sums = nullptr;  // [B, Hkv, rows, parts]: maximum, sum
  float* part_out = nullptr;    // [B, Hkv, rows, parts, Dv]
};

// Adds up the parts: part_sums, part_out -> out, lse.
cudaError_t launch_merge_parts(const DecodeCall& call, cudaStream_t stream);

}  // namespace dmattn::cuda
