// Selection of up to 4,096 keys in one launch: a block for each head sorts them and resolves their lifetimes in shared memory.
//
// It is what sort_tiles, find_thresholds, distribute and resolve do where all keys of a head are one tile and one chunk: every
// key arrives at its own position, and from position `window` on every arrival makes the worst key present leave. So the keys
// behind the best `window` are those that die, and the arrivals are the positions themselves.
#pragma once

#include "../common/dependent_launch.cuh"
#include "../common/kernel_limits.cuh"
#include "../common/sort_numbers.cuh"
#include "keys.cuh"
#include "short.h"

namespace dmattn::cuda::selection {

inline constexpr uint32_t kAllBits = 0xffffffffU;
inline constexpr uint16_t kNeverSelected = 1 << 15;  // beside an index

// Sizes of a block, and its shared memory.
template <int kThreads>
struct alignas(16) ShortBlock {
  static constexpr int kEach = 4, kKeys = kThreads * kEach, kWarps = kThreads / 32;  // kEach: keys of a thread
  static constexpr int kPlaceBits = kKeys == 512 ? 9 : kKeys == 1024 ? 10 : kKeys == 2048 ? 11 : 12, kTopBits = 32 - kPlaceBits;
  static constexpr uint32_t kPlaceMask = kKeys - 1;
  static_assert((kKeys & (kKeys - 1)) == 0 && kKeys <= kMostShort && kKeys < kNeverSelected && 1 << kPlaceBits == kKeys);
  union {
    struct {
      uint32_t exchange[kKeys], codes[kKeys];
    } sort;
    uint32_t moved[2][kKeys];
    int32_t end[kKeys];
  };
  uint16_t order[kKeys];  // best first
  int32_t warp_counts[2][kWarps];
  uint32_t some, all;  // bits that are set in some, in all codes
};

// Keys whose codes are alike in the highest bits that differ have been sorted by those, and are neighbours: brings them into
// order by the bits below `shift`. place_of: of an index, and the other way round. top_of: the highest bits of a code.
template <int kThreads, class PlaceOf, class TopOf, class NeverFlag>
__device__ __forceinline__ void order_alike(ShortBlock<kThreads>& shared, const uint32_t (&codes)[ShortBlock<kThreads>::kEach],
                                            uint32_t (&numbers)[ShortBlock<kThreads>::kEach], int32_t length, int32_t shift,
                                            const PlaceOf& place_of, const TopOf& top_of, const NeverFlag& never_flag) {
  using Block = ShortBlock<kThreads>;
  constexpr int kEach = Block::kEach, kPlaceBits = Block::kPlaceBits, kMostAlike = 32;
  constexpr uint32_t kPlaceMask = Block::kPlaceMask;
  const int32_t thread = static_cast<int32_t>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kEach; ++i) shared.sort.exchange[thread * kEach + i] = numbers[i];
  __syncthreads();
  const auto top_at = [&](int32_t at) { return shared.sort.exchange[at] >> kPlaceBits; };
  const auto index_of_place = [&](uint32_t number) { return place_of(static_cast<int32_t>(number & kPlaceMask)); };
  bool are_many = false;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int32_t at = thread * kEach + i;
    are_many |= at + kMostAlike < length && top_at(at) == top_at(at + kMostAlike);
  }
  // Where few are alike, each finds its place among them.
  if (!__syncthreads_or(are_many)) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int32_t at = thread * kEach + i, index = index_of_place(numbers[i]);
      const uint32_t top = numbers[i] >> kPlaceBits, code = shared.sort.codes[index];
      int32_t rank = at;
      // What is beyond the length stays where it is: all of it is alike, and it may be half of the places.
      for (int32_t other = at - 1; at < length && other >= 0 && top_at(other) == top; --other) {
        rank -= shared.sort.codes[index_of_place(shared.sort.exchange[other])] > code;
      }
      for (int32_t other = at + 1; other < length && top_at(other) == top; ++other) {
        rank += shared.sort.codes[index_of_place(shared.sort.exchange[other])] < code;
      }
      shared.order[rank] = static_cast<uint16_t>(index) | never_flag(code);
    }
    return;
  }
  // Otherwise sort by the lower bits first, and then again by the higher ones and the places that they led to.
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    numbers[i] = (codes[i] & ((1U << shift) - 1)) << kPlaceBits | static_cast<uint32_t>(place_of(thread * kEach + i));
  }
  sort_numbers<kThreads>(numbers, shared.sort.exchange);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int32_t index = index_of_place(numbers[i]);
    shared.order[thread * kEach + i] = static_cast<uint16_t>(index);
    numbers[i] = top_of(shared.sort.codes[index]) | static_cast<uint32_t>(thread * kEach + i);
  }
  sort_numbers<kThreads>(numbers, shared.sort.exchange);
  __syncthreads();
  uint16_t indices[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) indices[i] = shared.order[numbers[i] & kPlaceMask];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kEach; ++i) shared.order[thread * kEach + i] = indices[i] | never_flag(shared.sort.codes[indices[i]]);
}

// scores [n] of a head -> shared.order [kKeys]: indices of keys, the best first, with a flag for those that are never selected.
template <int kThreads>
__device__ __forceinline__ void sort_keys(const SelectParams& p, const Head& head, ShortBlock<kThreads>& shared, int32_t length) {
  using Block = ShortBlock<kThreads>;
  constexpr int kEach = Block::kEach;
  const int32_t thread = static_cast<int32_t>(threadIdx.x), lane = thread % 32;
  if (thread == 0) shared.some = 0, shared.all = kAllBits;
  // Read the codes, as complements: a better key has a smaller one. Find the bits in which they differ.
  uint32_t codes[kEach];
  const auto index_at = [&](int i) { return thread * kEach + i; };
  read_codes(p, codes, [&](int i) { return head.scores + min(index_at(i), length - 1); });
  uint32_t mine = 0, ours = kAllBits;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int32_t index = index_at(i);
    codes[i] = index < length && index >= p.sink ? ~codes[i] : kAllBits;
    if (index < length) mine |= codes[i], ours &= codes[i];
    shared.sort.codes[index] = codes[i];
  }
  __syncthreads();
  mine = __reduce_or_sync(kAllBits, mine), ours = __reduce_and_sync(kAllBits, ours);
  if (lane == 0) atomicOr(&shared.some, mine), atomicAnd(&shared.all, ours);
  __syncthreads();
  const uint32_t differ = (shared.some & ~shared.all) >> silent_bits(p.dtype) << silent_bits(p.dtype);
  // Sort by the highest of those bits, as many as fit into a word beside the place of a key. Among equal keys the latest comes
  // first; what is beyond the length comes last.
  const int32_t highest = differ != 0 ? 32 - __clz(differ) : 0, shift = max(0, highest - Block::kTopBits);
  const auto place_of = [&](int32_t index) { return index < length ? length - 1 - index : index; };  // its own inverse
  const auto top_of = [&](uint32_t code) { return (code >> shift) << Block::kPlaceBits; };
  uint32_t numbers[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) numbers[i] = top_of(codes[i]) | static_cast<uint32_t>(place_of(index_at(i)));
  sort_numbers<kThreads>(numbers, shared.sort.exchange);
  const auto never_flag = [&](uint32_t code) { return static_cast<uint16_t>(code == kAllBits ? kNeverSelected : 0); };
  __syncthreads();
  if (shift == 0 || !(differ & ((1U << shift) - 1))) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int32_t index = place_of(static_cast<int32_t>(numbers[i] & Block::kPlaceMask));
      shared.order[thread * kEach + i] = static_cast<uint16_t>(index) | never_flag(shared.sort.codes[index]);
    }
  } else {
    order_alike(shared, codes, numbers, length, shift, place_of, top_of, never_flag);
  }
  __syncthreads();
}

// Matches deaths and arrivals by halving, as in resolve. `items` are those of the places first, first + 32, ...: place behind the
// best `window` << 16 | the step the key is there from. Afterwards the item in a place is the key that dies there.
template <int kThreads>
__device__ __forceinline__ void match_deaths(ShortBlock<kThreads>& shared, uint32_t (&items)[ShortBlock<kThreads>::kEach],
                                             int32_t first, int32_t levels) {
  constexpr int kEach = ShortBlock<kThreads>::kEach;
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32, lane = static_cast<int32_t>(threadIdx.x) % 32, steps = 1 << levels;
  for (int level = levels; level > 0; --level) {
    const int32_t size = 1 << level, half = size / 2;
    uint32_t* const to = shared.moved[level & 1];
    uint32_t flags[kEach];
    int32_t of_warp = 0;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int32_t node = (first + 32 * k) & ~(size - 1);
      flags[k] = __ballot_sync(kAllBits, static_cast<int32_t>(items[k] & 0xffff) <= node + half);
      of_warp += __popc(flags[k]);
    }
    // Count the keys of the first half before this warp, where several warps share a node.
    int32_t before = 0;
    if (size > 32 * kEach) {
      int32_t* const counts = shared.warp_counts[level & 1];
      if (lane == 0) counts[warp] = of_warp;
      __syncthreads();
      const bool counts_here = lane < warp && lane >= (warp & ~(size / (32 * kEach) - 1));
      before = static_cast<int32_t>(__reduce_add_sync(kAllBits, counts_here ? counts[lane] : 0));
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      if (k > 0 && (k * 32 & (size - 1)) == 0) before = 0;  // a node begins
      const int32_t x = first + 32 * k, node = x & ~(size - 1);
      const uint32_t lanes_of_node = ((1U << lane) - 1) & ~((1U << (node % 32)) - 1);
      const int32_t earlier = before + __popc(flags[k] & lanes_of_node);
      before += __popc(flags[k]);
      const bool first_half = (flags[k] >> lane & 1) && earlier < half;
      if (x < steps) to[first_half ? node + earlier : node + half + (x - node) - min(earlier, half)] = items[k];
    }
    if (size > 32 * kEach) {
      __syncthreads();
    } else {
      __syncwarp();
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      if (first + 32 * k < steps) items[k] = to[first + 32 * k];
    }
  }
  __syncthreads();
}

// scores [B, Hkv, n] -> end [B, Hkv, n]. A block for each batch and head, kThreads * kEach >= n > window > 0.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) select_short(const SelectParams p, const int32_t window) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  constexpr int kEach = ShortBlock<kThreads>::kEach;
  __shared__ ShortBlock<kThreads> shared;
  const int32_t length = static_cast<int32_t>(p.length), thread = static_cast<int32_t>(threadIdx.x);
  const int64_t batch_head = blockIdx.x;
  const Head head(p, Work(), batch_head);
  sort_keys(p, head, shared, length);

  // Without causality the best keys live for ever, and that is all.
  if (!p.is_causal) {
    for (int32_t rank = thread; rank < length; rank += kThreads) {
      const bool is_kept = rank < window && !(shared.order[rank] & kNeverSelected);
      p.end[batch_head * length + (shared.order[rank] & (kNeverSelected - 1))] = is_kept ? kForever : kNever;
    }
    return;
  }

  // Find the key that each death is of. A warp has kEach groups of 32 neighbouring places.
  const int32_t deaths = length - window, levels = deaths > 1 ? 32 - __clz(deaths - 1) : 0, steps = 1 << levels,
                fillers = steps - deaths;
  const int32_t first = thread / 32 * (32 * kEach) + thread % 32;
  uint32_t items[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int32_t x = first + 32 * k;
    items[k] = static_cast<uint32_t>(deaths + 1 + x);
    if (x >= fillers && x < steps) {
      const int32_t place = steps - 1 - x;  // worst first
      const int32_t index = shared.order[window + place] & (kNeverSelected - 1);
      items[k] = static_cast<uint32_t>(place) << 16 | static_cast<uint32_t>(max(0, index + 1 - window));
    }
  }
  match_deaths(shared, items, first, levels);

  // Put the ends in the order of the keys, and write them.
  for (int32_t index = thread; index < length; index += kThreads) {
    shared.end[index] = end_without_place(p, head, index, length);
  }
  __syncthreads();
  for (int32_t rank = thread; rank < window; rank += kThreads) {
    if (!(shared.order[rank] & kNeverSelected)) shared.end[shared.order[rank]] = kForever;
  }
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int32_t x = first + 32 * k;
    if (x >= deaths) continue;
    const uint16_t word = shared.order[window + (items[k] >> 16)];
    if (!(word & kNeverSelected)) shared.end[word] = later_by_local(p, head, word, window + x, length);
  }
  __syncthreads();
  for (int32_t index = thread; index < length; index += kThreads) p.end[batch_head * length + index] = shared.end[index];
}

inline cudaError_t launch_select_short(const SelectParams& p, int32_t window, cudaStream_t stream) {
  const unsigned blocks = grid_of(p.batch * p.heads);
  if (p.length <= 512) return launch_dependent(select_short<128>, blocks, 128, 0, stream, p, window);
  if (p.length <= 1024) return launch_dependent(select_short<256>, blocks, 256, 0, stream, p, window);
  if (p.length <= 2048) return launch_dependent(select_short<512>, blocks, 512, 0, stream, p, window);
  return launch_dependent(select_short<1024>, blocks, 1024, 0, stream, p, window);
}

}  // namespace dmattn::cuda::selection
