// Selection restarts with each document: the first index of the group of every key, one block for each list of segment ends.
//
// The two forms of selection group differently, as they do on the CPU. Causal: a visible key starts a group when the visible
// key before it has another segment end; hidden keys change nothing. Not causal: a group reaches from its first key to that
// key's segment end, the next one starts there, and a hidden key that a group would start with is a group of its own.
#pragma once

#include <cub/block/block_scan.cuh>

#include "../common/dependent_launch.cuh"
#include "keys.cuh"

namespace dmattn::cuda::selection {

constexpr int kGroupThreads = 1024, kGroupItems = 4, kGroupTile = kGroupThreads * kGroupItems;

struct Larger {
  __device__ int32_t operator()(int32_t a, int32_t b) const { return max(a, b); }
};

using GroupScan = cub::BlockScan<int32_t, kGroupThreads>;

// Turns starts (the index of a key that starts a group, else -1) into groups; `current` is carried from tile to tile.
__device__ inline void write_groups(int32_t (&starts)[kGroupItems], int32_t& current, int32_t* groups, int32_t first,
                                    int32_t length, GroupScan::TempStorage& storage) {
  int32_t last = -1;
  GroupScan(storage).InclusiveScan(starts, starts, Larger(), last);
  for (int i = 0; i < kGroupItems; ++i) {
    if (first + i < length) groups[first + i] = max(current, starts[i]);
  }
  current = max(current, last);
  __syncthreads();
}

// segment ends [group_batches, group_heads, n] -> groups, likewise. A block for each batch and head of them.
static __global__ void __launch_bounds__(kGroupThreads) find_causal_groups(const SelectParams p, const Work work) {
  griddepcontrol_wait();
  __shared__ GroupScan::TempStorage storage;
  const int32_t* segments = segments_of(p, blockIdx.x / work.group_heads, blockIdx.x % work.group_heads);
  int32_t* groups = work.groups + static_cast<int64_t>(blockIdx.x) * work.length;
  int32_t last_visible = -1, current = 0;
  for (int32_t base = 0; base < work.length; base += kGroupTile) {
    const int32_t first = base + static_cast<int32_t>(threadIdx.x) * kGroupItems;
    int32_t ends[kGroupItems], visible[kGroupItems], previous[kGroupItems], last = -1;
    for (int i = 0; i < kGroupItems; ++i) {
      ends[i] = first + i < work.length ? segment_end_of(segments, first + i, work.length) : 0;
      visible[i] = ends[i] > first + i ? first + i : -1;
    }
    GroupScan(storage).ExclusiveScan(visible, previous, last_visible, Larger(), last);
    last_visible = max(last_visible, last);
    __syncthreads();
    for (int i = 0; i < kGroupItems; ++i) {
      const bool continues = previous[i] >= 0 && segment_end_of(segments, previous[i], work.length) == ends[i];
      if (continues) visible[i] = -1;
    }
    write_groups(visible, current, groups, first, work.length, storage);
  }
}

// The end of the group that starts at `first`, when selection is not causal.
__device__ inline int32_t group_end(const int32_t* segments, int32_t first, int32_t length) {
  if (segments == nullptr) return length;
  const int32_t end = segment_end_of(segments, first, length);
  return end > first ? end : first + 1;
}

// The same when selection is not causal. Group starts are a chain: each knows the next. Within a tile the keys on it are found by
// doubling the length of the jumps.
static __global__ void __launch_bounds__(kGroupThreads) find_chained_groups(const SelectParams p, const Work work) {
  griddepcontrol_wait();
  __shared__ GroupScan::TempStorage storage;
  __shared__ int32_t jumps[kGroupTile + 1];  // kGroupTile: beyond the tile
  __shared__ uint8_t on_chain[kGroupTile + 1];
  __shared__ int32_t entry;  // the first group start that is not before the tile
  const int32_t* segments = segments_of(p, blockIdx.x / work.group_heads, blockIdx.x % work.group_heads);
  int32_t* groups = work.groups + static_cast<int64_t>(blockIdx.x) * work.length;
  const int32_t offset = static_cast<int32_t>(threadIdx.x) * kGroupItems;
  int32_t current = 0;
  if (threadIdx.x == 0) entry = 0, jumps[kGroupTile] = kGroupTile, on_chain[kGroupTile] = 1;
  __syncthreads();
  for (int32_t base = 0; base < work.length; base += kGroupTile) {
    int32_t nexts[kGroupItems];
    for (int i = 0; i < kGroupItems; ++i) {
      const int32_t index = base + offset + i;
      nexts[i] = index < work.length ? group_end(segments, index, work.length) : base + kGroupTile;
      jumps[offset + i] = min(nexts[i] - base, kGroupTile);
      on_chain[offset + i] = index == entry;
    }
    __syncthreads();
    for (bool more = true; more;) {
      int32_t once[kGroupItems], twice[kGroupItems];
      bool marked[kGroupItems], adds = false;
      for (int i = 0; i < kGroupItems; ++i) {
        once[i] = jumps[offset + i];
        twice[i] = jumps[once[i]];
        marked[i] = on_chain[offset + i];
        adds |= marked[i] && !on_chain[once[i]];
      }
      more = __syncthreads_or(adds);
      for (int i = 0; i < kGroupItems; ++i) {
        if (marked[i]) on_chain[once[i]] = 1;
        jumps[offset + i] = twice[i];
      }
      __syncthreads();
    }
    int32_t starts[kGroupItems];
    for (int i = 0; i < kGroupItems; ++i) {
      const bool is_start = on_chain[offset + i] != 0;
      starts[i] = is_start ? base + offset + i : -1;
      if (is_start && nexts[i] >= base + kGroupTile) entry = nexts[i];
    }
    write_groups(starts, current, groups, base + offset, work.length, storage);
  }
}

}  // namespace dmattn::cuda::selection
