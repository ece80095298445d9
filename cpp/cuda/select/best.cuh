// Selection where one set of keys serves all queries and there are no documents: the threshold is found digit by digit, no sort.
// The blocks of a cluster share the keys of a head, each a piece of them, and add up their counts.
//
// Among equal scores later keys are better. If more keys tie at the threshold than are needed, the block in whose piece the
// last needed one lies counts them from the end; nobody else needs an order.
#pragma once

#include <cub/block/block_scan.cuh>

#include "../common/dependent_launch.cuh"
#include "../ptx/cluster.cuh"
#include "keys.cuh"

namespace dmattn::cuda::selection {

constexpr int kBestThreads = 1024, kDigitBits = 11, kBins = 1 << kDigitBits;
constexpr int kAtOnce = 4;          // keys that a thread reads at once
constexpr int kMostBest = 1 << 17;  // keys of a head; without clusters one block looks at all of them, so longer ones are sorted

inline bool has_one_set(const SelectParams& p) {
  return !p.is_causal && p.segment_end.data == nullptr && p.dtype != DType::kFloat64 && p.length <= kMostBest;
}

// Blocks for a head, where there are clusters: no more than have kBestThreads * kAtOnce keys each, but for the last. With 8
// blocks 16 heads took 1.7 to 2.5 times as long on an H200, as if not all clusters had found place at once.
inline int best_blocks(const SelectParams& p) {
  int blocks = 1;
  while (blocks < 4 && p.length > blocks * (kBestThreads * kAtOnce)) blocks *= 2;
  return blocks;
}

// A cluster for each batch and head: the best `window` keys, fewer than there are, get kForever, the others kNever.
__global__ void __launch_bounds__(kBestThreads) keep_best_of_head(const SelectParams p, int32_t window) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  static_assert(kBins == 2 * kBestThreads && 32 > 2 * kDigitBits);
  using Scan = cub::BlockScan<int32_t, kBestThreads>;
  __shared__ typename Scan::TempStorage storage;
  __shared__ alignas(8) int32_t all_counts[2][kBins];  // alternately, so that no block clears what another one still reads
  __shared__ int32_t chosen, still_needed, chosen_count;
  const int32_t thread = static_cast<int32_t>(threadIdx.x), length = static_cast<int32_t>(p.length);
  const int32_t blocks = Cluster::size(), rank = Cluster::rank();
  const int64_t batch_head = static_cast<int32_t>(blockIdx.x) / blocks, scores = Head(p, Work(), batch_head).scores;
  const int32_t piece = (length + blocks - 1) / blocks, begin = min(rank * piece, length), stop = min(begin + piece, length);
  const auto for_piece = [&](const auto& use) {
    for (int32_t base = begin + thread; base < stop; base += kBestThreads * kAtOnce) {
      uint32_t codes[kAtOnce];
      read_codes(p, codes, [&](int i) { return scores + min(base + i * kBestThreads, stop - 1); });
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (base + i * kBestThreads < stop) use(base + i * kBestThreads, codes[i]);
      }
    }
  };

  // The code of the worst key that is kept, from the front: its digits so far, and how many keys that begin with them are kept.
  // The low bits of codes of 16-bit scores follow from the others.
  uint32_t worst = 0;
  int32_t needed = window, tied = 0, shift = 32, buffer = 0;
  for (const int32_t last_shift = p.dtype == DType::kFloat32 ? 0 : 32 - 2 * kDigitBits; shift > last_shift; buffer ^= 1) {
    int32_t* const counts = all_counts[buffer];
    const int32_t width = min(shift, kDigitBits);
    const uint64_t decided = worst;
    shift -= width;
    counts[thread] = counts[thread + kBestThreads] = 0;
    __syncthreads();
    for_piece([&](int32_t, uint32_t code) {
      if (uint64_t{code} >> (shift + width) == decided) atomicAdd(&counts[(code >> shift) & ((1U << width) - 1)], 1);
    });
    Cluster::sync();
    const int32_t bin = kBins - 1 - 2 * thread;  // the best one first
    int32_t mine[2] = {}, before[2];
#pragma unroll 2
    for (int32_t i = 0; i < blocks; ++i) {  // a power of two
      const int2 pair = *reinterpret_cast<const int2*>(Cluster::of(counts, i ^ rank) + bin - 1);
      mine[0] += pair.y, mine[1] += pair.x;
    }
    Scan(storage).ExclusiveSum(mine, before);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (before[i] < needed && needed <= before[i] + mine[i]) {
        chosen = bin - i, still_needed = needed - before[i], chosen_count = mine[i];
      }
    }
    __syncthreads();
    worst = worst << width | static_cast<uint32_t>(chosen);
    needed = still_needed, tied = chosen_count;
    __syncthreads();
  }

  // Of the keys that tie, the last ones.
  const int32_t* const counts = all_counts[buffer ^ 1];
  const int32_t digit = chosen, tied_here = counts[digit];
  if (needed < tied) {
    for (int32_t i = rank + 1; i < blocks; ++i) needed -= Cluster::of(counts, i)[digit];
  }
  // Not as needed = min(max(needed, 0), tied_here) and a look at its ends: ptxas 13.0 gets that comparison wrong.
  const bool keeps_none = needed <= 0, keeps_all = needed >= tied_here;
  int32_t* const end = p.end + batch_head * length;
  if (keeps_none || keeps_all) {
    const uint32_t least = worst + (keeps_none ? 1 : 0);
    for_piece([&](int32_t index, uint32_t code) { end[index] = code != 0 && code >> shift >= least ? kForever : kNever; });
  } else {
    for (int32_t last = stop - 1; last >= begin; last -= kBestThreads * kAtOnce) {
      const int32_t mine = last - thread * kAtOnce;  // and the keys in front of it
      uint32_t codes[kAtOnce];
      read_codes(p, codes, [&](int i) { return scores + max(mine - i, begin); });
      int32_t ties = 0, rank_of_first, all;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) ties += mine - i >= begin && codes[i] >> shift == worst;
      Scan(storage).ExclusiveSum(ties, rank_of_first, all);
      int32_t left = needed - rank_of_first;  // ties that are still kept, from this thread's first on
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t code = codes[i] >> shift;
        if (mine - i >= begin)
          end[mine - i] = codes[i] != 0 && (code > worst || (code == worst && left-- > 0)) ? kForever : kNever;
      }
      needed -= all;
      __syncthreads();
    }
  }
  Cluster::sync();  // others may still be reading this block's counts
}

}  // namespace dmattn::cuda::selection
