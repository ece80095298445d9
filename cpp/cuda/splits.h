// What decoding kernels get: how the keys of each sequence are split among blocks, and where the splits meet. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../params.h"

namespace dmattn::cuda {

inline constexpr int kLeastSplitKeys = 128, kMostSplitKeys = 2048;
inline constexpr int kMostSplits = (1 << 20) / kMostSplitKeys;

// Keys in a split, by the capacity of the cache alone: what else is in the batch must not change a sequence's sums. Short splits
// fill the GPU for one sequence; from 32 of them on, splits grow instead.
inline int split_keys_of(int64_t capacity) {
  constexpr int kEnoughSplits = 32;
  int64_t keys = kLeastSplitKeys;
  while (keys < kMostSplitKeys && keys * kEnoughSplits < capacity) keys *= 2;
  return static_cast<int>(keys);
}

struct DecodeCall {
  DecodeParams p;
  float scale = 0.0f;
  int rows = 0;  // of a key head: query t of its group's head g is row t * group + g
  int split_keys = 0, splits = 1;
  // What splits found, null when there is one: sums of weights with the maximum they are relative to, a negative sum for a page
  // number that is out of range; and values added up with those weights. Splits that begin behind the length are not written.
  float2* part_sums = nullptr;  // [B, Hkv, rows, splits]: maximum, sum
  float* part_out = nullptr;    // [B, Hkv, rows, splits, Dv]
};

// Adds up the splits: part_sums, part_out -> out, lse.
cudaError_t launch_merge_splits(const DecodeCall& call, cudaStream_t stream);

}  // namespace dmattn::cuda
