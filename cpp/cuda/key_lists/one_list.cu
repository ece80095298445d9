// Makes one list of the live keys of a mask head, for all its queries, in an order in which tiles of the list end together.
//
// The Hopper backward loops over the queries of a tile of keys, from the first that sees one of them to the last. So keys are
// ordered by the quarter of the queries in which their intervals begin, then by the last query that sees them.
#include "../common/dependent_launch.cuh"
#include "../common/kernel_limits.cuh"
#include "../common/sort_numbers.cuh"
#include "../common/visibility.cuh"
#include "../live_keys.h"

namespace dmattn::cuda {
namespace {

constexpr int kEach = 4, kBits = 12;  // keys of a thread; bits of a key and of a query
static_assert(1 << kBits == kMostOneList);

// start, end [.., Sk] -> index, span, lists, count, shift of one segment. A block for each mask head, kThreads * kEach >= Sk.
template <int kThreads>
__global__ __launch_bounds__(kThreads) void one_list_kernel(const __grid_constant__ AttentionParams p,
                                                            const __grid_constant__ LiveKeys live_keys) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  __shared__ uint32_t exchange[kThreads * kEach];
  __shared__ int live;
  const int thread = static_cast<int>(threadIdx.x), mask_head = static_cast<int>(blockIdx.x);
  const int heads = static_cast<int>(live_keys.heads), batch = mask_head / heads;
  const int head = (mask_head - batch * heads) * static_cast<int>(live_keys.head_divisor);
  const SpanSource spans(p.mask, static_cast<int>(p.key_length), batch, head);
  const int queries = static_cast<int>(p.query_length), low = spans.key_length - queries, high = low + queries - 1;
  const int quarter = (queries + 3) / 4;
  if (thread == 0) live = 0;
  __syncthreads();

  // Describe each key by a number: its quarter, the last query that sees it, and itself; keys that nobody sees come last.
  uint32_t numbers[kEach];
  int mine = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int key = thread * kEach + i;
    const Span span = spans.of_key(key);
    const bool is_live = span.touches(low, high);
    const int first = max(span.first - low, 0), last = min(span.last - 1 - low, queries - 1);
    numbers[i] = static_cast<uint32_t>(is_live ? (first / quarter << kBits | last) : -1) << kBits | static_cast<uint32_t>(key);
    mine += is_live;
  }
  mine = __reduce_add_sync(0xffffffffu, mine);
  if (thread % 32 == 0 && mine > 0) atomicAdd(&live, mine);
  sort_numbers<kThreads>(numbers, exchange);
  __syncthreads();

  // Write the list.
  const int count = live;
  int32_t* const index = live_keys.index + mask_head * live_keys.capacity;
  int2* const span_of = live_keys.span + mask_head * live_keys.capacity;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int at = thread * kEach + i, key = static_cast<int>(numbers[i] & (kMostOneList - 1));
    if (at >= count) break;
    const Span span = spans.of_key(key);
    index[at] = key;
    span_of[at] = {span.first, span.last};
  }
  if (thread != 0) return;
  live_keys.lists[mask_head * live_keys.most_lists] = {0, count};
  live_keys.count[mask_head] = count;
  live_keys.shift[mask_head] = live_keys.shortest;
  if (mask_head == 0) *live_keys.tile_counter = *live_keys.row_flags = 0;
}

}  // namespace

cudaError_t launch_one_list(const AttentionParams& p, const LiveKeys& live_keys, cudaStream_t stream) {
  const unsigned blocks = grid_of(live_keys.batches * live_keys.heads);
  if (p.key_length <= 512) return launch_dependent(one_list_kernel<128>, blocks, 128, 0, stream, p, live_keys);
  if (p.key_length <= 1024) return launch_dependent(one_list_kernel<256>, blocks, 256, 0, stream, p, live_keys);
  if (p.key_length <= 2048) return launch_dependent(one_list_kernel<512>, blocks, 512, 0, stream, p, live_keys);
  return launch_dependent(one_list_kernel<1024>, blocks, 1024, 0, stream, p, live_keys);
}

}  // namespace dmattn::cuda
