// From which key to which do neighbouring queries see any? For kernels that take keys in order although there are intervals.
#include "../calls.h"
#include "../common/device.cuh"
#include "../common/kernel_limits.cuh"
#include "../common/visibility.cuh"

namespace dmattn::cuda {
namespace {

constexpr int kWarps = 4, kPerLane = 4, kWarpKeys = 32 * kPerLane, kBlockKeys = kWarps * kWarpKeys;

// start, end [B|1, H|Hkv|1, Sk] -> ranges [mask heads, range_count], zero before. A warp takes kWarpKeys keys of a mask head, and
// enters the first and the last of them that some query of a range sees, for all ranges whose queries see any.
__global__ __launch_bounds__(kWarps * 32) void key_ranges_kernel(const __grid_constant__ AttentionParams p,
                                                                 const __grid_constant__ LiveKeys live_keys) {
  const int key_length = static_cast<int>(p.key_length), query_length = static_cast<int>(p.query_length);
  const int shift = key_length - query_length, lane = static_cast<int>(threadIdx.x) % 32;
  const int parts = (key_length + kBlockKeys - 1) / kBlockKeys, mask_head = static_cast<int>(blockIdx.x) / parts;
  const int heads = static_cast<int>(live_keys.heads), head = mask_head % heads * static_cast<int>(live_keys.head_divisor);
  const int first_key = static_cast<int>(blockIdx.x) % parts * kBlockKeys + static_cast<int>(threadIdx.x) / 32 * kWarpKeys;
  const SpanSource source(p.mask, key_length, mask_head / heads, head);
  int2* const ranges = live_keys.ranges + mask_head * live_keys.range_count;

  // Read the spans, and find the queries that see one of the keys.
  Span spans[kPerLane];
  int low = kLastPosition, high = kFirstPosition;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    spans[i] = source.of_key(first_key + i * 32 + lane);
    if (spans[i].first < spans[i].last) low = min(low, spans[i].first), high = max(high, spans[i].last);
  }
  const int first_query = max(__reduce_min_sync(0xffffffffu, low) - shift, 0);
  const int end_query = min(__reduce_max_sync(0xffffffffu, high) - shift, query_length);

  // For each range of those queries, find the first and the last key.
  const int queries = live_keys.range_queries;
  for (int number = first_query / queries; number * queries < end_query; ++number) {
    const int from = number * queries, to = min(from + queries, query_length) - 1;
    int first = kWarpKeys, last = -1;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const uint32_t seen = __ballot_sync(0xffffffffu, spans[i].touches(from + shift, to + shift));
      if (!seen) continue;
      first = min(first, i * 32 + __ffs(static_cast<int>(seen)) - 1);
      last = i * 32 + 31 - __clz(static_cast<int>(seen));
    }
    if (last < 0) continue;
    // Two lanes enter one number each. Most do not change what is there.
    int* const range = &ranges[number].x + lane;
    const int entry = lane == 0 ? key_length - (first_key + first) : first_key + last + 1;
    if (lane < 2 && *range < entry) atomicMax(range, entry);
  }
}

}  // namespace

cudaError_t launch_key_ranges(const AttentionParams& p, const LiveKeys& live_keys, cudaStream_t stream) {
  const int64_t mask_heads = live_keys.batches * live_keys.heads, parts = (p.key_length + kBlockKeys - 1) / kBlockKeys;
  const size_t bytes = static_cast<size_t>(mask_heads * live_keys.range_count) * sizeof(int2) + sizeof(int32_t);
  const cudaError_t status = cudaMemsetAsync(live_keys.ranges, 0, bytes, stream);
  if (status != cudaSuccess) return status;
  key_ranges_kernel<<<grid_of(mask_heads * parts), kWarps * 32, 0, stream>>>(p, live_keys);
  return cudaGetLastError();
}

}  // namespace dmattn::cuda
