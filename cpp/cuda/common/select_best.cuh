// Selection where one set of keys serves all queries and there are no documents: the threshold is found digit by digit, no sort.
//
// The one surprise is the end: among equal scores later keys are better. If more keys tie at the threshold than are needed, one
// ordered pass counts them from the last; otherwise no order matters.
#pragma once

#include <cub/block/block_scan.cuh>

#include "dependent_launch.cuh"
#include "select_keys.cuh"

namespace dmattn::cuda::selection {

constexpr int kBestThreads = 1024, kDigitBits = 11, kBins = 1 << kDigitBits;
constexpr int kAtOnce = 4;          // keys that a thread reads at once
constexpr int kMostBest = 1 << 17;  // keys of a row; one block looks at all of them, so a longer one is better sorted

inline bool has_one_set(const SelectParams& p) {
  return !p.is_causal && p.segment_end.data == nullptr && p.dtype != DType::kFloat64 && p.length <= kMostBest;
}

// A block per row: the best `window` keys, fewer than there are, get kForever, the others kNever.
__global__ void __launch_bounds__(kBestThreads) keep_best_of_row(const SelectParams p, int32_t window) {
  wait_for_kernel_before();
  let_kernel_after_come();
  static_assert(kBins == 2 * kBestThreads && 32 > 2 * kDigitBits);
  using Scan = cub::BlockScan<int32_t, kBestThreads>;
  __shared__ typename Scan::TempStorage storage;
  __shared__ int32_t counts[kBins];
  __shared__ int32_t chosen, still_needed;
  const int32_t thread = static_cast<int32_t>(threadIdx.x), length = static_cast<int32_t>(p.length);
  const int64_t row = blockIdx.x, scores = Head(p, Work(), row).scores;
  const auto for_all = [&](const auto& use) {
    for (int32_t base = thread; base < length; base += kBestThreads * kAtOnce) {
      uint32_t codes[kAtOnce];
      read_codes(p, codes, [&](int i) { return scores + min(base + i * kBestThreads, length - 1); });
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (base + i * kBestThreads < length) use(base + i * kBestThreads, codes[i]);
      }
    }
  };

  // The code of the worst key that is kept, from the front: its digits so far, and how many keys that begin with them are kept.
  uint32_t worst = 0;
  int32_t needed = window, all = 0;
  for (int shift = 32; shift > 0;) {
    const int width = min(shift, kDigitBits);
    const uint64_t decided = worst;
    shift -= width;
    counts[thread] = counts[thread + kBestThreads] = 0;
    __syncthreads();
    for_all([&](int32_t, uint32_t code) {
      if (uint64_t{code} >> shift + width == decided) atomicAdd(&counts[code >> shift & (1U << width) - 1], 1);
    });
    __syncthreads();
    const int32_t bin = kBins - 1 - 2 * thread;  // the best one first
    int32_t mine[2] = {counts[bin], counts[bin - 1]}, before[2];
    Scan(storage).ExclusiveSum(mine, before);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (before[i] < needed && needed <= before[i] + mine[i]) chosen = bin - i, still_needed = needed - before[i];
    }
    __syncthreads();
    worst = worst << width | static_cast<uint32_t>(chosen);
    needed = still_needed, all = counts[chosen];
    __syncthreads();
  }

  int32_t* const end = p.end + row * length;
  if (needed == all) {
    for_all([&](int32_t index, uint32_t code) { end[index] = code != 0 && code >= worst ? kForever : kNever; });
    return;
  }
  for (int32_t last = length - 1; last >= 0; last -= kBestThreads) {
    const int32_t index = last - thread;
    uint32_t codes[1];
    read_codes(p, codes, [&](int) { return scores + max(index, 0); });
    const uint32_t code = index >= 0 ? codes[0] : 0;
    const int32_t is_tied = index >= 0 && code == worst;
    int32_t rank, tied;
    Scan(storage).ExclusiveSum(is_tied, rank, tied);
    if (index >= 0) end[index] = code != 0 && (code > worst || (is_tied && rank < needed)) ? kForever : kNever;
    needed -= tied;
    __syncthreads();
  }
}

}  // namespace dmattn::cuda::selection
