// The plan of a call with intervals: the keys that some query sees, compacted per mask head, with summaries of blocks of them.
//
// The one surprise is that one CTA does a whole row: it reads three ints per key once, which is nothing beside the attention that
// follows, and needs neither a second launch nor a look at other CTAs.
#include "../attention_launch.h"
#include "visibility.cuh"

namespace dmattn::cuda {
namespace {

constexpr int kWarps = 32, kKeysPerLane = 4;

__global__ __launch_bounds__(kWarps * 32) void plan_kernel(const __grid_constant__ AttentionParams p,
                                                           const __grid_constant__ Plan plan) {
  __shared__ int warp_counts[2][kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t row = blockIdx.x;
  const int batch = static_cast<int>(row / plan.heads), head = static_cast<int>(row % plan.heads * plan.head_divisor);
  const SpanSource spans(p.mask, static_cast<int>(p.key_length), batch, head);
  const int low = static_cast<int>(p.key_length - p.query_length), high = static_cast<int>(p.key_length) - 1;
  int32_t* const index = plan.index + row * plan.capacity;
  int32_t* const first = plan.first + row * plan.capacity;
  int32_t* const last = plan.last + row * plan.capacity;

  // Compact: each warp takes 128 keys at a time, its place is the number of live keys in front.
  int written = 0;
  const int key_length = static_cast<int>(p.key_length);
  for (int base = 0, turn = 0; base < key_length; base += kWarps * 32 * kKeysPerLane, turn ^= 1) {
    Span span[kKeysPerLane];
    unsigned alive[kKeysPerLane];
    int count = 0;
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) span[i] = spans.of_key(base + (warp * kKeysPerLane + i) * 32 + lane);
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) {
      alive[i] = __ballot_sync(0xffffffffu, span[i].touches(low, high));
      count += __popc(alive[i]);
    }
    if (lane == 0) warp_counts[turn][warp] = count;
    __syncthreads();
    int place = written;
    for (int w = 0; w < kWarps; ++w) {
      const int other = warp_counts[turn][w];
      place += w < warp ? other : 0;
      written += other;
    }
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) {
      if (alive[i] >> lane & 1) {
        const int at = place + __popc(alive[i] & ((1u << lane) - 1));
        index[at] = base + (warp * kKeysPerLane + i) * 32 + lane;
        first[at] = span[i].first, last[at] = span[i].last;
      }
      place += __popc(alive[i]);
    }
  }
  __syncthreads();

  // Summarise: one warp per block, those without keys too, so that a reader need not wait for the count.
  for (int block = warp; block < static_cast<int>(plan.capacity / kPlanBlock); block += kWarps) {
    int smallest = kLastPosition, largest = kFirstPosition;
    for (int at = block * kPlanBlock + lane; at < min(written, (block + 1) * kPlanBlock); at += 32) {
      smallest = min(smallest, first[at]);
      largest = max(largest, last[at]);
    }
    smallest = __reduce_min_sync(0xffffffffu, smallest);
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (lane == 0) {
      int32_t* const summary = plan.summary + (row * (plan.capacity / kPlanBlock) + block) * 2;
      summary[0] = smallest, summary[1] = largest;
    }
  }
  if (threadIdx.x == 0) plan.count[row] = written;
  if (threadIdx.x == 0 && row == 0) *plan.ticket = 0;
}

// One block puts the quarter of the query tiles with the shortest lists last, longest first, so that all SMs finish together. The
// others stay as they are, head by head, so that their keys stay in L2.
__global__ __launch_bounds__(kWarps * 32) void order_kernel(const __grid_constant__ AttentionParams p,
                                                            const __grid_constant__ Plan plan) {
  constexpr int kThreads = kWarps * 32, kBuckets = kThreads;
  __shared__ int places[kBuckets], warp_counts[2][kWarps];
  __shared__ int shortest_kept;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int tiles = (static_cast<int>(p.query_length) + kQueryPadding - 1) / kQueryPadding;
  const int items = static_cast<int>(p.batch * p.heads) * tiles;
  int shift = 0;
  while ((p.mask.tiles_k >> shift) >= kBuckets) ++shift;
  const auto length_of = [&](int item) {
    const int batch_head = item / tiles, heads = static_cast<int>(p.heads);
    const int row = (tiles - 1 - item % tiles) * kQueryPadding / static_cast<int>(p.mask.tile_q);
    const int32_t* const rows = TileSource(p.mask, batch_head / heads, batch_head % heads).rows;
    return min(max(rows[row * (p.mask.tiles_k + 1)], 0), static_cast<int>(p.mask.tiles_k)) >> shift;
  };

  // How many tiles have each length; which lengths make up the shortest quarter; where each of those begins.
  places[thread] = 0;
  __syncthreads();
  for (int item = thread; item < items; item += kThreads) atomicAdd(&places[length_of(item)], 1);
  __syncthreads();
  if (thread == 0) {
    int shorter = 0, length = 0;
    for (; length < kBuckets && shorter + places[length] <= items / 4; ++length) {
      const int count = places[length];
      shorter += count;
      places[length] = items - shorter;
    }
    shortest_kept = length;
  }
  __syncthreads();

  int kept = 0;
  for (int base = 0, turn = 0; base < items; base += kThreads, turn ^= 1) {
    const int item = base + thread, length = item < items ? length_of(item) : 0;
    const bool keeps = item < items && length >= shortest_kept;
    const unsigned keepers = __ballot_sync(0xffffffffu, keeps);
    if (lane == 0) warp_counts[turn][warp] = __popc(keepers);
    __syncthreads();
    int place = kept;
    for (int w = 0; w < kWarps; ++w) {
      place += w < warp ? warp_counts[turn][w] : 0;
      kept += warp_counts[turn][w];
    }
    if (keeps) plan.order[place + __popc(keepers & ((1u << lane) - 1))] = item;
    if (!keeps && item < items) plan.order[atomicAdd(&places[length], 1)] = item;
  }
}

}  // namespace

cudaError_t launch_order(const AttentionParams& p, const Plan& plan, cudaStream_t stream) {
  order_kernel<<<1, kWarps * 32, 0, stream>>>(p, plan);
  return cudaGetLastError();
}

cudaError_t launch_plan(const AttentionParams& p, const Plan& plan, cudaStream_t stream) {
  plan_kernel<<<static_cast<unsigned>(plan.batches * plan.heads), kWarps * 32, 0, stream>>>(p, plan);
  return cudaGetLastError();
}

}  // namespace dmattn::cuda
