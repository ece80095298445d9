// The scheduler's order of tiles under a block mask: the tiles with the fewest keys last.
#pragma once

#include "scheduler.cuh"

namespace dmattn::cuda::sm90 {

template <int kDim, class Traits>
__device__ __forceinline__ void Scheduler<kDim, Traits>::find_short_tiles(uint32_t work_tiles) {
  const int others = static_cast<int>(work_tiles - gridDim.x), each = (others + kThreads - 1) / kThreads;
  // Find the largest number of entries than which at most a quarter of a sample of the tiles have fewer.
  const int sample = entries_of(gridDim.x + static_cast<uint32_t>(others * thread_ / kThreads));
  int few = 0;
  for (int step = 1 << (31 - __clz(static_cast<int>(call_.p.mask.tiles_k))); step > 0; step /= 2) {
    if (group_count(kBarrier, kThreads, sample < few + step) <= kThreads / 4) few += step;
  }
  uint32_t is_short = 0;
  if (any(sample < few)) {  // otherwise tiles are alike
    for (int i = 0; i < each && thread_ * each + i < others; ++i) {
      if (entries_of(gridDim.x + static_cast<uint32_t>(thread_ * each + i)) < few) is_short |= 1u << i;
    }
  }
  const int mine = __popc(is_short);
  int up_to = mine;
  for (int step = 1; step < 32; step *= 2) {
    const int left = __shfl_up_sync(0xffffffffu, up_to, step);
    if (thread_ % 32 >= step) up_to += left;
  }
  if (thread_ % 32 == 31) queues_.warp_counts[0][thread_ / 32] = up_to;
  sync();
  int before = up_to - mine, all = 0;
  for (int w = 0; w < kWarps; ++w) {
    const int other = queues_.warp_counts[0][w];
    before += w < thread_ / 32 ? other : 0;
    all += other;
  }
  queues_.is_short[thread_] = is_short;
  queues_.short_before[thread_] = static_cast<uint16_t>(before);
  if (thread_ == 0) queues_.short_tiles = all;
  sync();
}

// The tile that is `at`-th in that order. The thread that has its bit tells the others.
template <int kDim, class Traits>
__device__ __forceinline__ uint32_t Scheduler<kDim, Traits>::long_first(uint32_t at, uint32_t work_tiles) {
  const int others = static_cast<int>(work_tiles - gridDim.x), each = (others + kThreads - 1) / kThreads;
  const int first = thread_ * each, mine = max(0, min(each, others - first));
  const int long_tiles = others - queues_.short_tiles, short_before = queues_.short_before[thread_];
  const bool is_short = static_cast<int>(at) >= long_tiles;
  const int rank = static_cast<int>(at) - (is_short ? long_tiles + short_before : first - short_before);
  const uint32_t tiles = queues_.is_short[thread_] ^ (is_short ? 0u : 0xffffffffu);
  uint32_t candidates = mine == 32 ? tiles : tiles & ((1u << mine) - 1);
  if (rank >= 0 && rank < __popc(candidates)) {
    for (int i = 0; i < rank; ++i) candidates &= candidates - 1;
    queues_.work_tile = gridDim.x + static_cast<uint32_t>(first + __ffs(static_cast<int>(candidates)) - 1);
  }
  sync();
  const uint32_t work_tile = queues_.work_tile;
  sync();
  return work_tile;
}

template <int kDim, class Traits>
__device__ __forceinline__ int Scheduler<kDim, Traits>::entries_of(uint32_t work_tile) const {
  const WorkTile<Traits> tile(call_, work_, work_tile);
  const MaskParams& mask = call_.p.mask;
  const int count =
      TileSource(mask, tile.batch, tile.head).rows[tile.first_query / static_cast<int>(mask.tile_q) * (mask.tiles_k + 1)];
  return min(max(count, 0), static_cast<int>(mask.tiles_k));
}

}  // namespace dmattn::cuda::sm90
