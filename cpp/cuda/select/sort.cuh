// Selection's sort: tiles of keys are sorted in shared memory, then runs are merged pairwise, every head at once.
//
// The last pass leaves not the keys but their indices in order, and for each tile of them how many belong to each chunk of
// positions or an earlier one. That table is all the later kernels need to find thresholds.
#pragma once

#include <cub/block/block_merge_sort.cuh>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_scan.cuh>

#include "../common/dependent_launch.cuh"
#include "keys.cuh"

namespace dmattn::cuda::selection {

template <class Key>
struct SortStorage {
  static constexpr int kChunksPerThread = kMaxChunks / kThreads<Key>;
  // Narrow keys are sorted by their codes alone, digit by digit; equal ones keep their order.
  using Sort = std::conditional_t<kIsWide<Key>, cub::BlockMergeSort<Key, kThreads<Key>, kItems>,
                                  cub::BlockRadixSort<uint32_t, kThreads<Key>, kItems, uint16_t>>;
  using Scan = cub::BlockScan<int32_t, kThreads<Key>>;
  struct Finish {
    uint32_t words[kTile<Key>];
    int32_t counters[kMaxChunks];
    typename Scan::TempStorage scan;
  };
  union {
    typename Sort::TempStorage sort;
    Key keys[kTile<Key> + kItems];  // a merge may read a little beyond its input
    Finish finish;
  };
};

// Writes a tile of sorted keys, kItems consecutive ones per thread, to `to` or in the final form. Shared memory is free to use.
template <class Key, bool kLast>
__device__ void write_tile(const Work& work, int64_t batch_head, int32_t tile, int32_t valid, const Key (&keys)[kItems], Key* to,
                           SortStorage<Key>& storage) {
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t first = batch_head * work.length + static_cast<int64_t>(tile) * kTile<Key>;
  __syncthreads();
  if constexpr (!kLast) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) storage.keys[thread * kItems + i] = keys[i];
    __syncthreads();
    for (int i = thread; i < valid; i += kThreads<Key>) to[first + i] = storage.keys[i];
  } else {
    auto& finish = storage.finish;
    for (int i = thread; i < kMaxChunks; i += kThreads<Key>) finish.counters[i] = 0;
    __syncthreads();
    int run_chunk = 0, run = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const uint32_t word = order_word(keys[i]);
      finish.words[thread * kItems + i] = word;
      if (thread * kItems + i < valid) {
        if (chunk_of(word) != run_chunk && run > 0) atomicAdd(&finish.counters[run_chunk], run), run = 0;
        run_chunk = chunk_of(word), ++run;
      }
    }
    if (run > 0) atomicAdd(&finish.counters[run_chunk], run);
    __syncthreads();
    for (int i = thread; i < valid; i += kThreads<Key>) work.order[first + i] = finish.words[i];
    if (work.counts == nullptr) return;
    constexpr int kEach = SortStorage<Key>::kChunksPerThread;
    int32_t counts[kEach];
    for (int i = 0; i < kEach; ++i) counts[i] = finish.counters[thread * kEach + i];
    typename SortStorage<Key>::Scan(finish.scan).InclusiveSum(counts, counts);
    int32_t* table = work.counts + (batch_head * work.tiles + tile) * work.chunks;
    for (int i = 0; i < kEach; ++i) {
      if (thread * kEach + i < work.chunks) table[thread * kEach + i] = counts[i];
    }
  }
}

template <class Key>
struct Preferred {
  __device__ bool operator()(const Key& a, const Key& b) const { return a < b; }
};

// scores [B, Hkv, n] -> keys [heads, n], sorted within tiles, or, where a tile is all there is, order and counts. A block for
// each tile; for causal selection it also writes the `end` that most keys have.
template <class Key, bool kLast>
__global__ void __launch_bounds__(kThreads<Key>, 2) sort_tiles(const SelectParams p, const Work work) {
  griddepcontrol_wait();
  __shared__ SortStorage<Key> storage;
  const int64_t batch_head = blockIdx.x / work.tiles;
  const int32_t tile = static_cast<int32_t>(blockIdx.x % work.tiles), first = tile * kTile<Key>;
  const Head head(p, work, batch_head);
  const int32_t valid = min(kTile<Key>, work.length - first), thread = static_cast<int32_t>(threadIdx.x);
  if (p.is_causal) {
    for (int32_t index = first + thread; index < first + valid; index += kThreads<Key>) {
      // What most keys end with; the later kernels write the others.
      p.end[batch_head * work.length + index] = end_without_place(p, head, index, work.length);
      work.arrives[batch_head * work.length + index] = 0;
    }
  }
  Key keys[kItems];
  if constexpr (kIsWide<Key>) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int32_t index = first + i * kThreads<Key> + thread;
      keys[i] = ~Key{0};
      if (index >= work.length) continue;
      keys[i] = make_key<Key>(code_of(p, head, index, work.length), head.groups ? head.groups[index] : 0, index);
    }
    typename SortStorage<Key>::Sort(storage.sort).Sort(keys, Preferred<Key>());
  } else {
    __shared__ uint32_t some, all;  // bits that are set in some, in all codes
    if (thread == 0) some = 0, all = 0xffffffffU;
    __syncthreads();
    uint32_t codes[kItems];  // complements: the best first, then the latest, then what is beyond the tile
    uint16_t offsets[kItems];
    uint32_t mine = 0, ours = 0xffffffffU;
    const auto offset_of = [&](int i) { return valid - 1 - (thread * kItems + i); };
    read_codes(p, codes, [&](int i) { return head.scores + first + max(offset_of(i), 0); });
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int32_t offset = offset_of(i);
      codes[i] = offset >= 0 && first + offset >= p.sink ? ~codes[i] : 0xffffffffU;
      if (offset >= 0) mine |= codes[i], ours &= codes[i];
      offsets[i] = static_cast<uint16_t>(offset);
    }
    mine = __reduce_or_sync(0xffffffffU, mine), ours = __reduce_and_sync(0xffffffffU, ours);
    if (thread % 32 == 0) atomicOr(&some, mine), atomicAnd(&all, ours);
    __syncthreads();
    // Only digits that differ: integers have few, bfloat16 and float16 none below their own, which say no more than the sign.
    const uint32_t differ = (some & ~all) >> silent_bits(p.dtype) << silent_bits(p.dtype);
    if (differ != 0) typename SortStorage<Key>::Sort(storage.sort).Sort(codes, offsets, __ffs(differ) - 1, 32 - __clz(differ));
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      keys[i] = thread * kItems + i < valid ? make_key<Key>(~codes[i], 0, first + offsets[i]) : ~Key{0};
    }
  }
  write_tile<Key, kLast>(work, batch_head, tile, valid, keys, static_cast<Key*>(work.keys[0]), storage);
}

// How many of the first `outputs` merged keys come from a. A whole warp asks, 32 places at a time.
template <class Key>
__device__ int32_t merge_split(const Key* a, int32_t a_count, const Key* b, int32_t b_count, int32_t outputs) {
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32;
  int32_t low = max(0, outputs - b_count), high = min(outputs, a_count);
  while (low < high) {
    const int32_t step = (high - low + 31) / 32, probe = low + (lane + 1) * step - 1;
    const bool taken = probe < high && a[probe] < b[outputs - 1 - probe];
    const int32_t count = __popc(__ballot_sync(0xffffffffU, taken));
    high = min(high, low + (count + 1) * step - 1);
    low += count * step;
  }
  return low;
}

// keys [heads, n] in sorted runs of `run` -> keys [heads, n] in runs twice as long, or, the last time, order and counts. A block
// for each tile of the result.
template <class Key, bool kLast>
__global__ void __launch_bounds__(kThreads<Key>) merge_runs(const Work work, const Key* from, Key* to, int32_t run) {
  griddepcontrol_wait();
  __shared__ SortStorage<Key> storage;
  __shared__ int32_t splits[2];
  const int64_t batch_head = blockIdx.x / work.tiles;
  const int32_t tile = static_cast<int32_t>(blockIdx.x % work.tiles), first = tile * kTile<Key>;
  const int32_t base = static_cast<int32_t>(first / (2 * static_cast<int64_t>(run)) * 2 * run);
  const int32_t a_count = min(run, work.length - base), b_count = max(0, min(run, work.length - base - run));
  const Key* a = from + batch_head * work.length + base;
  const Key* b = a + run;
  const int32_t begin = first - base, end = min(begin + kTile<Key>, a_count + b_count), valid = end - begin;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < 64) {
    const int32_t split = merge_split(a, a_count, b, b_count, thread < 32 ? begin : end);
    if (thread % 32 == 0) splits[thread / 32] = split;
  }
  __syncthreads();
  const int32_t a_first = splits[0], b_first = begin - a_first, from_a = splits[1] - a_first, from_b = valid - from_a;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int32_t offset = i * kThreads<Key> + thread;
    if (offset < valid) storage.keys[offset] = offset < from_a ? a[a_first + offset] : b[b_first + offset - from_a];
  }
  __syncthreads();
  const int32_t outputs = min(thread * kItems, valid);
  const int32_t taken = cub::MergePath(storage.keys, storage.keys + from_a, from_a, from_b, outputs, Preferred<Key>());
  Key keys[kItems];
  int places[kItems];
  cub::SerialMerge(storage.keys, taken, from_a + outputs - taken, from_a - taken, from_b - (outputs - taken), keys, places,
                   Preferred<Key>());
  write_tile<Key, kLast>(work, batch_head, tile, valid, keys, to, storage);
}

}  // namespace dmattn::cuda::selection
