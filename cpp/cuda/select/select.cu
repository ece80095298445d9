// Key selection kernels: scores to the end of each key's lifetime, by at most one sort and no sequential pass.
//
// Lifetimes are found in parallel as follows. Let T(i) be the `window`-th best key among positions 0..i. It only rises, and a
// key dies where T passes it. All keys are sorted, best first, and positions are cut into chunks of 1024. Then:
//
// find_thresholds: bounds[c + 1] is the first place in that order by which `window` keys of the chunks 0..c have come: T at the
//   end of chunk c. A table of counts that the sort leaves names the tile of the order, one look into that tile gives the place.
//
// distribute: the keys between bounds[c + 1] and bounds[c] die in chunk c, except those of later chunks: they were never alive.
//   The same counts say where each goes in the list of its chunk, so the lists stay in order.
//
// resolve: in a chunk, once the window is full, every key that arrives makes the worst one present leave (maybe itself). Halve
//   the arrivals: of the keys that die here, the worst that have come by then die in the first half, the others in the second.
//   After log2(chunk) halvings, each a stable partition in shared memory, one death is left to each arrival.
//
// O(N log N) operations whatever the scores are, in about log2(N / 4608) + 5 launches (4608 keys are sorted by one block, 2304 if
// wide), with 25 bytes of workspace per key (41 for float64 or documents, and 4 for each of a table of N/4608 x N/1024 counts).
// Documents are the leading digits of the sort key: the keys of a later document beat all earlier ones, whose deaths then count
// as the end of their document. A key competes when it leaves the local window, so every death is written `local` positions late;
// sinks never compete and end with their document. Not causal: the order alone decides, and mostly not even that is needed
// (best.cuh).
#include <cub/block/block_scan.cuh>

#include "../common/dependent_launch.cuh"
#include "../common/kernel_limits.cuh"
#include "../launch.h"
#include "best.cuh"
#include "groups.cuh"
#include "keys.cuh"
#include "short.h"
#include "sort.cuh"

namespace dmattn::cuda {
namespace selection {
namespace {

constexpr uint32_t kAllLanes = 0xffffffffU;

// What a visible key gets when the window never drops it.
__device__ int32_t lasting_end(const Head& head, int32_t index, int32_t length) {
  return segment_end_of(head.segments, index, length);
}

// The window has places for all keys or for none: no key takes another's place.
__global__ void __launch_bounds__(256) keep_all_or_none(const SelectParams p, const Work work, int64_t keys) {
  griddepcontrol_wait();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < keys; i += static_cast<int64_t>(gridDim.x) * 256) {
    const Head head(p, work, i / work.length);
    const int32_t index = static_cast<int32_t>(i % work.length);
    const bool kept = work.window > 0 && code_of(p, head, index, work.length) != 0;
    p.end[i] = kept          ? lasting_end(head, index, work.length)
               : p.is_causal ? end_without_place(p, head, index, work.length)
                             : kNever;
  }
}

// Not causal: the best `window` keys of a group live until its end. Groups lie one after the other in the order, the last one
// first.
__global__ void __launch_bounds__(256) keep_best(const SelectParams p, const Work work, int64_t keys) {
  griddepcontrol_wait();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x; i < keys; i += static_cast<int64_t>(gridDim.x) * 256) {
    const int64_t batch_head = i / work.length;
    const Head head(p, work, batch_head);
    const uint32_t word = work.order[i];
    const int32_t index = index_of(word), group = head.groups ? head.groups[index] : 0;
    const int32_t rank = static_cast<int32_t>(i % work.length) - (work.length - group_end(head.segments, group, work.length));
    const bool kept = !(word & kIneligible) && rank < work.window;
    p.end[batch_head * work.length + index] = kept ? segment_end_of(head.segments, group, work.length) : kNever;
  }
}

// A block per head and chunk c: bounds[c + 1], and the counts of column c (in this tile) become those of all tiles before.
template <int kBlock>
__global__ void __launch_bounds__(kBlock) find_thresholds(const Work work) {
  griddepcontrol_wait();
  constexpr int kTilesEach = 2;  // of at most 2^20 / (kBlock * kItems) tiles
  static_assert((1 << kIndexBits) <= kTilesEach * kBlock * kBlock * kItems);
  using Scan = cub::BlockScan<int32_t, kBlock>;
  __shared__ typename Scan::TempStorage storage;
  __shared__ int32_t crossing_tile, still_needed;
  const int64_t batch_head = blockIdx.x / work.chunks;
  const int32_t chunk = static_cast<int32_t>(blockIdx.x % work.chunks), thread = static_cast<int32_t>(threadIdx.x);
  int32_t* bounds = work.bounds + batch_head * (work.chunks + 1);
  if (thread == 0 && chunk == 0) bounds[0] = work.length;
  if (min((chunk + 1) * kChunk, work.length) < work.window) {
    if (thread == 0) bounds[chunk + 1] = work.length;
    return;
  }
  int32_t* column = work.counts + batch_head * work.tiles * work.chunks + chunk;
  int32_t counts[kTilesEach], before[kTilesEach];
  for (int i = 0; i < kTilesEach; ++i) {
    const int32_t tile = thread * kTilesEach + i;
    counts[i] = tile < work.tiles ? column[static_cast<int64_t>(tile) * work.chunks] : 0;
  }
  Scan(storage).ExclusiveSum(counts, before);
  for (int i = 0; i < kTilesEach; ++i) {
    const int32_t tile = thread * kTilesEach + i;
    if (tile < work.tiles) column[static_cast<int64_t>(tile) * work.chunks] = before[i];
    if (before[i] < work.window && work.window <= before[i] + counts[i])
      crossing_tile = tile, still_needed = work.window - before[i];
  }
  __syncthreads();
  const int32_t first = crossing_tile * kBlock * kItems + thread * kItems;
  const uint32_t* order = work.order + batch_head * work.length;
  bool belongs[kItems];
  int32_t mine = 0, earlier = 0;
  for (int i = 0; i < kItems; ++i) {
    belongs[i] = first + i < work.length && chunk_of(order[first + i]) <= chunk;
    mine += belongs[i];
  }
  Scan(storage).ExclusiveSum(mine, earlier);
  if (earlier < still_needed && still_needed <= earlier + mine) {
    for (int i = 0; i < kItems; ++i) {
      earlier += belongs[i];
      if (belongs[i] && earlier == still_needed) bounds[chunk + 1] = first + i + 1;
    }
  }
}

// A block per head and tile of the order: each key either lives on, was never alive, or goes to the list of the chunk it dies in.
template <int kBlock>
__global__ void __launch_bounds__(kBlock) distribute(const SelectParams p, const Work work) {
  griddepcontrol_wait();
  constexpr int kKeys = kBlock * kItems;
  using Scan = cub::BlockScan<int32_t, kBlock>;
  __shared__ typename Scan::TempStorage storage;
  __shared__ int32_t bounds[kMaxChunks + 1];
  __shared__ uint32_t words[kKeys];
  __shared__ uint16_t dies_in[kKeys];  // the chunk whose bounds enclose the key
  __shared__ uint16_t earlier[kKeys];  // keys before it in the tile that ever lived
  const int64_t batch_head = blockIdx.x / work.tiles;
  const int32_t tile = static_cast<int32_t>(blockIdx.x % work.tiles), base = tile * kKeys;
  const int32_t thread = static_cast<int32_t>(threadIdx.x), valid = min(kKeys, work.length - base);
  for (int32_t i = thread; i <= work.chunks; i += kBlock) bounds[i] = work.bounds[batch_head * (work.chunks + 1) + i];
  for (int32_t i = thread; i < valid; i += kBlock) words[i] = work.order[batch_head * work.length + base + i];
  __syncthreads();

  const int32_t offset = thread * kItems;
  int32_t chunk = 0;  // the last one whose bound lies beyond the key
  for (int32_t step = kMaxChunks; step > 0; step /= 2) {
    if (chunk + step <= work.chunks && bounds[chunk + step] > base + offset) chunk += step;
  }
  int32_t lived[kItems], before[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    while (chunk > 0 && bounds[chunk] <= base + offset + i) --chunk;
    dies_in[offset + i] = static_cast<uint16_t>(chunk);
    lived[i] = offset + i < valid && chunk_of(words[offset + i]) <= chunk;
  }
  Scan(storage).ExclusiveSum(lived, before);
#pragma unroll
  for (int i = 0; i < kItems; ++i) earlier[offset + i] = static_cast<uint16_t>(before[i]);
  __syncthreads();

  const Head head(p, work, batch_head);
  const int32_t* before_tile = work.counts + (batch_head * work.tiles + tile) * work.chunks;
  for (int32_t i = thread; i < valid; i += kBlock) {
    const uint32_t word = words[i];
    const int32_t index = index_of(word), death = dies_in[i];
    if (chunk_of(word) > death) continue;
    const int64_t at = batch_head * work.length + index;
    work.arrives[at] = 1;
    if (death < work.chunks) {
      const int32_t list_start = bounds[death + 1];
      const int32_t place =
          list_start >= base ? earlier[i] - earlier[list_start - base] : earlier[i] + before_tile[death] - work.window;
      work.doomed[batch_head * work.length + death * kChunk + place] = word;
    } else if (!(word & kIneligible)) {
      p.end[at] = lasting_end(head, index, work.length);
    }
  }
}

// A block per head and chunk: matches each arrival with the death it causes. A warp handles kEach groups of 32 keys.
constexpr int kEach = 4, kResolveThreads = kChunk / kEach;

// The number of set flags in the groups before `group` of a node of `width` groups (a power of two), and in earlier lanes.
__device__ int32_t rank_among_groups(uint32_t flags, const uint32_t* group_flags, int group, int width) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool counts = lane < group && lane >= (group & ~(width - 1));
  return static_cast<int32_t>(__reduce_add_sync(kAllLanes, counts ? __popc(group_flags[lane]) : 0)) +
         __popc(flags & ((1U << lane) - 1));
}

// A barrier of the first `warps` warps of a block.
__device__ void sync_warps(int warps) { asm volatile("barrier.sync 1, %0;" ::"r"(warps * 32) : "memory"); }

// arrives, doomed [heads, n] -> end [B, Hkv, n] of the keys that die in a chunk. A block for each head and chunk.
__global__ void __launch_bounds__(kResolveThreads) resolve(const SelectParams p, const Work work) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  static_assert(kChunk == 32 * 32, "one lane per group of 32 keys");
  constexpr int kArrivalFlags = 2;
  __shared__ uint32_t group_flags[3][32];
  __shared__ uint32_t moved[2][kChunk];
  __shared__ uint16_t arrivals[kChunk];  // of the chunk, by order of arrival: offset in the chunk
  __shared__ uint16_t ordinals[kChunk];  // by offset in the chunk: 1 + order of arrival
  const int64_t batch_head = blockIdx.x / work.chunks;
  const int32_t chunk = static_cast<int32_t>(blockIdx.x % work.chunks), base = chunk * kChunk;
  const int32_t lane = static_cast<int32_t>(threadIdx.x) % 32, first_group = static_cast<int32_t>(threadIdx.x) / 32 * kEach;
  const int32_t keys = min(kChunk, work.length - base), room = max(0, work.window - base);
  if (keys <= room) return;  // the window is not full yet

  const uint8_t* arrives = work.arrives + batch_head * work.length + base;
  uint32_t flags[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int32_t offset = (first_group + k) * 32 + lane;
    flags[k] = __ballot_sync(kAllLanes, offset < keys && arrives[offset] != 0);
    if (lane == 0) group_flags[kArrivalFlags][first_group + k] = flags[k];
  }
  __syncthreads();
  const int32_t deaths = static_cast<int32_t>(__reduce_add_sync(kAllLanes, __popc(group_flags[kArrivalFlags][lane]))) - room;
  if (deaths <= 0) return;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int32_t offset = (first_group + k) * 32 + lane;
    const int32_t ordinal = rank_among_groups(flags[k], group_flags[kArrivalFlags], first_group + k, 32);
    if (flags[k] >> lane & 1) arrivals[ordinal] = static_cast<uint16_t>(offset);
    ordinals[offset] = static_cast<uint16_t>(ordinal + 1);
  }
  __syncthreads();

  // One step per death, numbered from 1, filled up to a power of two: a filler comes in the step it leaves in and is worse than
  // all.
  const int levels = deaths > 1 ? 32 - __clz(deaths - 1) : 0, steps = 1 << levels, fillers = steps - deaths;
  const int busy_warps = (steps + 32 * kEach - 1) / (32 * kEach);
  if (static_cast<int>(threadIdx.x) / 32 >= busy_warps) return;  // where scores are random that is most of them
  const uint32_t* doomed = work.doomed + batch_head * work.length + base;
  uint32_t items[kEach];  // place in doomed << 16 | the step the key is there from
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int32_t x = (first_group + k) * 32 + lane;
    items[k] = static_cast<uint32_t>(deaths + 1 + x);
    if (x >= fillers && x < steps) {
      const int32_t place = steps - 1 - x;  // worst first
      const int32_t index = index_of(doomed[place]);
      const int32_t since = index < base ? 0 : max(0, ordinals[index - base] - room);
      items[k] = static_cast<uint32_t>(place) << 16 | static_cast<uint32_t>(since);
    }
  }
  for (int level = levels; level > 0; --level) {
    const int32_t size = 1 << level, half = size / 2;
    uint32_t* to = moved[level & 1];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int32_t x = (first_group + k) * 32 + lane, node = x & ~(size - 1);
      flags[k] = __ballot_sync(kAllLanes, static_cast<int32_t>(items[k] & 0xffff) <= node + half);
      if (level > 5 && lane == 0) group_flags[level & 1][first_group + k] = flags[k];
    }
    if (level > 5) sync_warps(busy_warps);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int32_t x = (first_group + k) * 32 + lane, node = x & ~(size - 1);
      const uint32_t lanes_of_node = ((1U << lane) - 1) & ~((1U << (node % 32)) - 1);
      const int32_t earlier = level > 5 ? rank_among_groups(flags[k], group_flags[level & 1], first_group + k, size / 32)
                                        : __popc(flags[k] & lanes_of_node);
      const bool first_half = (flags[k] >> lane & 1) && earlier < half;
      const int32_t place = first_half ? node + earlier : node + half + (x - node) - min(earlier, half);
      if (x < steps) to[place] = items[k];
    }
    if (level > 5) {
      sync_warps(busy_warps);
    } else {
      __syncwarp();
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int32_t x = (first_group + k) * 32 + lane;
      if (x < steps) items[k] = to[x];
    }
  }

  const Head head(p, work, batch_head);
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int32_t x = (first_group + k) * 32 + lane;
    if (x >= deaths) continue;
    const uint32_t word = doomed[items[k] >> 16];
    if (word & kIneligible) continue;
    const int32_t index = index_of(word), cause = base + arrivals[room + x];
    const bool same_group = head.groups == nullptr || head.groups[index] == head.groups[cause];
    p.end[batch_head * work.length + index] =
        same_group ? later_by_local(p, head, index, cause, work.length) : lasting_end(head, index, work.length);
  }
}

// ---- host ----

bool needs_wide_keys(const SelectParams& p) { return p.dtype == DType::kFloat64 || p.segment_end.data != nullptr; }

// Whether the window has places for all keys or for none, so that scores need no order.
bool keeps_all_or_none(const SelectParams& p) {
  return p.window == 0 || (p.window >= p.length && (p.is_causal || p.segment_end.data == nullptr));
}

// Lays out the workspace from `memory` on (null when only the size is wanted) and returns its size.
size_t lay_out(const SelectParams& p, char* memory, Work& work) {
  const bool wide = needs_wide_keys(p);
  const int64_t batch_heads = p.batch * p.heads, tile = wide ? kTile<WideKey> : kTile<NarrowKey>;
  work.length = static_cast<int32_t>(p.length);
  work.window = static_cast<int32_t>(p.window < p.length ? p.window : p.length);
  work.chunks = static_cast<int32_t>((p.length + kChunk - 1) / kChunk);
  work.tiles = static_cast<int32_t>((p.length + tile - 1) / tile);
  size_t used = 0;
  const auto take = [&](auto*& pointer, int64_t count, size_t bytes) {
    if (memory != nullptr) pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(memory + used);
    used += (static_cast<size_t>(count) * bytes + 255) / 256 * 256;
  };
  if (has_one_set(p) || is_short(p) || (keeps_all_or_none(p) && p.sink == 0)) return 0;
  if (p.segment_end.data != nullptr) {
    work.group_batches = static_cast<int32_t>(p.segment_end.batch_stride == 0 ? 1 : p.batch);
    work.group_heads = static_cast<int32_t>(p.segment_end.head_stride == 0 ? 1 : p.heads);
    take(work.groups, int64_t{work.group_batches} * work.group_heads * p.length, sizeof(int32_t));
  }
  if (keeps_all_or_none(p)) return used;
  const size_t key_bytes = wide ? sizeof(WideKey) : sizeof(NarrowKey);
  if (work.tiles > 1) take(work.keys[0], batch_heads * p.length, key_bytes);
  if (work.tiles > 2) take(work.keys[1], batch_heads * p.length, key_bytes);
  take(work.order, batch_heads * p.length, sizeof(uint32_t));
  if (p.is_causal) {
    take(work.counts, batch_heads * work.tiles * work.chunks, sizeof(int32_t));
    take(work.bounds, batch_heads * (work.chunks + 1), sizeof(int32_t));
    take(work.arrives, batch_heads * p.length, sizeof(uint8_t));
    take(work.doomed, batch_heads * p.length, sizeof(uint32_t));
  }
  return used;
}

template <class Key>
cudaError_t launch_sort(const SelectParams& p, const Work& work, int64_t batch_heads, cudaStream_t stream) {
  const unsigned blocks = grid_of(batch_heads * work.tiles);
  const auto sort = work.tiles == 1 ? sort_tiles<Key, true> : sort_tiles<Key, false>;
  cudaError_t status = launch_dependent(sort, blocks, kThreads<Key>, 0, stream, p, work);
  Key* from = static_cast<Key*>(work.keys[0]);
  Key* to = static_cast<Key*>(work.keys[1]);
  for (int32_t run = kTile<Key>; status == cudaSuccess && run < work.length; run *= 2) {
    const auto merge = 2 * run < work.length ? merge_runs<Key, false> : merge_runs<Key, true>;
    status = launch_dependent(merge, blocks, kThreads<Key>, 0, stream, work, from, to, run);
    Key* previous = from;
    from = to, to = previous;
  }
  return status;
}

template <class Key>
cudaError_t launch_all(const SelectParams& p, const Work& work, int64_t batch_heads, cudaStream_t stream) {
  cudaError_t status = launch_sort<Key>(p, work, batch_heads, stream);
  if (status != cudaSuccess || !p.is_causal) return status;
  const unsigned chunks = grid_of(batch_heads * work.chunks), tiles = grid_of(batch_heads * work.tiles);
  status = launch_dependent(find_thresholds<kThreads<Key>>, chunks, kThreads<Key>, 0, stream, work);
  if (status == cudaSuccess) status = launch_dependent(distribute<kThreads<Key>>, tiles, kThreads<Key>, 0, stream, p, work);
  if (status == cudaSuccess) status = launch_dependent(resolve, chunks, kResolveThreads, 0, stream, p, work);
  return status;
}

}  // namespace
}  // namespace selection

size_t select_workspace_bytes(const SelectParams& p) {
  selection::Work work;
  return selection::lay_out(p, nullptr, work);
}

cudaError_t launch_select(const SelectParams& p, void* workspace, cudaStream_t stream) {
  using namespace selection;
  const int64_t batch_heads = p.batch * p.heads, keys = batch_heads * p.length;
  if (keys == 0) return cudaSuccess;
  Work work;
  lay_out(p, static_cast<char*>(workspace), work);
  const auto simple_grid = static_cast<unsigned>(keys < (int64_t{1} << 30) ? (keys + 255) / 256 : 1 << 22);
  if (is_short(p) && !keeps_all_or_none(p)) return launch_short(p, work.window, stream);
  if (has_one_set(p) && !keeps_all_or_none(p)) {
    const auto blocks = static_cast<unsigned>(has_dependent_launch() ? best_blocks(p) : 1);
    return launch_dependent_clusters(keep_best_of_head, blocks, grid_of(batch_heads * blocks), kBestThreads, 0, stream, p,
                                     work.window);
  }
  cudaError_t status = cudaSuccess;
  if (work.groups != nullptr) {
    const auto group_blocks = grid_of(int64_t{work.group_batches} * work.group_heads);
    status =
        launch_dependent(p.is_causal ? find_causal_groups : find_chained_groups, group_blocks, kGroupThreads, 0, stream, p, work);
  }
  if (status == cudaSuccess && keeps_all_or_none(p)) {
    return launch_dependent(keep_all_or_none, simple_grid, 256, 0, stream, p, work, keys);
  }
  if (status == cudaSuccess) {
    const auto launch = needs_wide_keys(p) ? launch_all<WideKey> : launch_all<NarrowKey>;
    status = launch(p, work, batch_heads, stream);
  }
  if (status == cudaSuccess && !p.is_causal) status = launch_dependent(keep_best, simple_grid, 256, 0, stream, p, work, keys);
  return status;
}

}  // namespace dmattn::cuda
