// Selection of up to 4,096 keys of few heads in one launch and without a sort: each key counts the keys that are better.
//
// A key dies with the arrival of the `window`-th key that is better, so it needs no other key's lifetime. That is length^2
// comparisons a head, spread over as many blocks as there are, where a sort by one block a head would leave most of a GPU idle.
#pragma once

#include "../common/dependent_launch.cuh"
#include "../common/kernel_limits.cuh"
#include "keys.cuh"
#include "short.h"

namespace dmattn::cuda::selection {

// scores [B, Hkv, n] -> end [B, Hkv, n]. A block for each kCountThreads / kParts keys of a head, kKeys >= n > window > 0.
template <int kKeys>
__global__ void __launch_bounds__(kCountThreads) select_by_counts(const SelectParams p, const int32_t window) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  constexpr int kParts = count_parts(kKeys), kPart = kKeys / kParts, kGroup = 32, kGroups = kPart / kGroup,
                kEach = kKeys / kCountThreads;
  constexpr int kBlockKeys = kCountThreads / kParts;
  // Neighbouring groups and parts begin in different banks.
  const auto place_of = [](int index) { return index + index / kGroup * 4 + index / kPart * 4; };
  __shared__ alignas(16) uint32_t codes[kKeys + kKeys / kGroup * 4 + kParts * 4];
  const int32_t length = static_cast<int32_t>(p.length), thread = static_cast<int32_t>(threadIdx.x);
  const int32_t blocks = (length + kBlockKeys - 1) / kBlockKeys, first = static_cast<int32_t>(blockIdx.x) % blocks * kBlockKeys;
  const int64_t batch_head = static_cast<int32_t>(blockIdx.x) / blocks;
  const Head head(p, Work(), batch_head);

  // Read the codes of all keys: 0 for those that are never selected.
  uint32_t read[kEach];
  const auto index_at = [&](int i) { return i * kCountThreads + thread; };
  read_codes(p, read, [&](int i) { return head.scores + min(index_at(i), length - 1); });
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int32_t index = index_at(i);
    codes[place_of(index)] = index < length && index >= p.sink ? read[i] : 0;
  }
  __syncthreads();

  // Count the better keys of each group of this thread's part. Among equal scores later keys are better.
  const int32_t key = first + thread / kParts, part = thread % kParts;
  const uint32_t code = key < length ? codes[place_of(key)] : 0;
  int32_t counts[kGroups], mine = 0;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int32_t base = part * kPart + group * kGroup;
    const uint32_t* const from = &codes[place_of(base)];
    const uint32_t bound = code - (base > key ? 1 : 0);
    int32_t count = 0;
#pragma unroll
    for (int i = 0; i < kGroup; i += 4) {
      const uint4 four = *reinterpret_cast<const uint4*>(&from[i]);
      count += (four.x > bound) + (four.y > bound) + (four.z > bound) + (four.w > bound);
    }
    if (base <= key && key < base + kGroup) {
      for (int i = key - base + 1; i < kGroup; ++i) count += from[i] == code;
    }
    counts[group] = count, mine += count;
  }
  int32_t up_to = mine;
#pragma unroll
  for (int step = 1; step < kParts; step *= 2) {
    const int32_t left = __shfl_up_sync(0xffffffffU, up_to, step, kParts);
    if (part >= step) up_to += left;
  }
  const int32_t all = __shfl_sync(0xffffffffU, up_to, kParts - 1, kParts);
  if (key >= length) return;

  // Find the arrival that makes the key leave, in the part in which the count reaches the window.
  int32_t* const end = p.end + batch_head * length + key;
  if (code == 0 || all < window) {
    if (part == 0) *end = code == 0 ? end_without_place(p, head, key, length) : kForever;
    return;
  }
  int32_t needed = window - (up_to - mine), group = 0;
  if (needed <= 0 || needed > mine) return;
#pragma unroll
  for (int i = 0; i < kGroups - 1; ++i) {
    if (group == i && needed > counts[i]) needed -= counts[i], ++group;
  }
  int32_t other = part * kPart + group * kGroup;
  for (;; ++other) {
    const uint32_t code_of_other = codes[place_of(other)];
    needed -= code_of_other > code || (code_of_other == code && other > key);
    if (needed == 0) break;
  }
  *end = later_by_local(p, head, key, max(other, key), length);
}

inline cudaError_t launch_select_by_counts(const SelectParams& p, int32_t window, cudaStream_t stream) {
  const unsigned blocks = grid_of(p.batch * p.heads * count_blocks(p));
  if (p.length <= 256) return launch_dependent(select_by_counts<256>, blocks, kCountThreads, 0, stream, p, window);
  if (p.length <= 512) return launch_dependent(select_by_counts<512>, blocks, kCountThreads, 0, stream, p, window);
  if (p.length <= 1024) return launch_dependent(select_by_counts<1024>, blocks, kCountThreads, 0, stream, p, window);
  if (p.length <= 2048) return launch_dependent(select_by_counts<2048>, blocks, kCountThreads, 0, stream, p, window);
  return launch_dependent(select_by_counts<4096>, blocks, kCountThreads, 0, stream, p, window);
}

}  // namespace dmattn::cuda::selection
