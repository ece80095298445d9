// The order in which the portable family starts query tiles under a block mask, where some tiles meet many more keys than others.
#include "../calls.h"
#include "../common/device.cuh"
#include "../common/visibility.cuh"

namespace dmattn::cuda {
namespace {

constexpr int kWarps = 32, kThreads = kWarps * 32;

// rows [.., Nq, 1 + Nk] of a block mask -> order [B * H * tiles]. One block puts the quarter of the query tiles with the shortest
// lists last, the longer ones of them first, so that all SMs finish together. The others keep their order, head by head, so that
// their keys stay in L2.
__global__ __launch_bounds__(kThreads) void order_kernel(const __grid_constant__ AttentionParams p,
                                                         const __grid_constant__ LiveKeys live_keys) {
  constexpr int kBuckets = kThreads;
  __shared__ int places[kBuckets], warp_counts[2][kWarps];
  __shared__ int shortest_kept;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int tiles = (static_cast<int>(p.query_length) + kQueryPadding - 1) / kQueryPadding;
  const int work_tiles = static_cast<int>(p.batch * p.heads) * tiles;
  int shift = 0;
  while ((p.mask.tiles_k >> shift) >= kBuckets) ++shift;
  const auto length_of = [&](int work_tile) {
    const int batch_head = work_tile / tiles, heads = static_cast<int>(p.heads);
    const int row = (tiles - 1 - work_tile % tiles) * kQueryPadding / static_cast<int>(p.mask.tile_q);
    const int32_t* const rows = TileSource(p.mask, batch_head / heads, batch_head % heads).rows;
    return min(max(rows[row * (p.mask.tiles_k + 1)], 0), static_cast<int>(p.mask.tiles_k)) >> shift;
  };

  // Count the tiles of each length. Find the lengths that make up the shortest quarter, and where the tiles of each length go.
  places[thread] = 0;
  __syncthreads();
  for (int work_tile = thread; work_tile < work_tiles; work_tile += kThreads) atomicAdd(&places[length_of(work_tile)], 1);
  __syncthreads();
  if (thread == 0) {
    int shorter = 0, length = 0;
    for (; length < kBuckets && shorter + places[length] <= work_tiles / 4; ++length) {
      const int count = places[length];
      shorter += count;
      places[length] = work_tiles - shorter;
    }
    shortest_kept = length;
  }
  __syncthreads();

  // Give each tile its place.
  int kept = 0;
  for (int base = 0, buffer = 0; base < work_tiles; base += kThreads, buffer ^= 1) {
    const int work_tile = base + thread, length = work_tile < work_tiles ? length_of(work_tile) : 0;
    const bool keeps = work_tile < work_tiles && length >= shortest_kept;
    const unsigned keepers = __ballot_sync(0xffffffffu, keeps);
    if (lane == 0) warp_counts[buffer][warp] = __popc(keepers);
    __syncthreads();
    int place = kept;
    for (int w = 0; w < kWarps; ++w) {
      place += w < warp ? warp_counts[buffer][w] : 0;
      kept += warp_counts[buffer][w];
    }
    if (keeps) live_keys.order[place + __popc(keepers & lanes_before())] = work_tile;
    if (!keeps && work_tile < work_tiles) live_keys.order[atomicAdd(&places[length], 1)] = work_tile;
  }
}

}  // namespace

cudaError_t launch_order(const AttentionParams& p, const LiveKeys& live_keys, cudaStream_t stream) {
  order_kernel<<<1, kThreads, 0, stream>>>(p, live_keys);
  return cudaGetLastError();
}

}  // namespace dmattn::cuda
