// Lists of live keys: one allocation for all of them, and the launch of the kernels that fill it.
#include "owned_live_keys.h"

namespace dmattn::cuda {
namespace {

// With a block mask there are no lists, only an order of the query tiles. A few tiles start all at once and need no order.
OwnedLiveKeys make_order(const AttentionParams& p, const Tensor& like, cudaStream_t stream) {
  constexpr int64_t kFewTiles = 512;
  const int64_t tiles = p.batch * p.heads * ceil_div(p.query_length, kQueryPadding);
  if (tiles <= kFewTiles) return {};
  const Tensor memory = empty_on(like, {tiles}, ScalarType::Int);
  LiveKeys live_keys;
  live_keys.order = static_cast<int32_t*>(memory.data_ptr());
  DMATTN_CUDA_CHECK(launch_order(p, live_keys, stream));
  return {memory, live_keys};
}

// Finds out how many mask heads there are, and which a head has.
void count_mask_heads(const AttentionParams& p, LiveKeys& live_keys) {
  const PerHead &start = p.mask.start, &end = p.mask.end;
  live_keys.head_divisor = p.heads;
  for (const PerHead* row : {&start, &end}) {
    if (row->data && row->head_divisor < live_keys.head_divisor) live_keys.head_divisor = row->head_divisor;
  }
  live_keys.heads = p.heads / live_keys.head_divisor;
  live_keys.batches = start.batch_stride != 0 || end.batch_stride != 0 ? p.batch : 1;
  live_keys.batch_stride = live_keys.batches > 1 ? live_keys.heads : 0;
}

}  // namespace

OwnedLiveKeys make_key_ranges(const AttentionParams& p, const Tensor& like, cudaStream_t stream, int queries) {
  LiveKeys live_keys;
  count_mask_heads(p, live_keys);
  live_keys.range_queries = queries;
  live_keys.range_count = ceil_div(p.query_length, queries);
  const int64_t ranges = live_keys.batches * live_keys.heads * live_keys.range_count;
  const Tensor memory = empty_on(like, {2 * ranges + 1}, ScalarType::Int);
  live_keys.ranges = static_cast<int2*>(memory.data_ptr());
  live_keys.tile_counter = reinterpret_cast<int32_t*>(live_keys.ranges + ranges);
  DMATTN_CUDA_CHECK(launch_key_ranges(p, live_keys, stream));
  return {memory, live_keys};
}

OwnedLiveKeys make_live_keys(const AttentionParams& p, const Tensor& like, cudaStream_t stream, LiveKeysOptions options) {
  if (p.mask.tiles.data && options.orders && p.query_length > 0 && p.key_length > 0) return make_order(p, like, stream);
  if (!gathers(p)) return {};
  LiveKeys live_keys;
  live_keys.keeps_live = options.keeps_live, live_keys.joins = options.joins, live_keys.lengthens = options.lengthens;
  live_keys.shortest = options.shortest;
  live_keys.by_lifetime = options.by_lifetime;
  while (options.is_one && segments_at(static_cast<int>(p.query_length), live_keys.shortest) > 1) ++live_keys.shortest;
  static_assert(kMostSegments * kSegmentQueries >= 1 << 20);
  check(p.query_length <= int64_t{1} << 20, "query: expected at most 2^20 queries, got ", p.query_length);
  const int64_t segments = segments_at(static_cast<int>(p.query_length), live_keys.shortest);
  // The live keys are themselves the list of a single segment.
  live_keys.capacity = segments > 1 ? kEntriesPerKey * p.key_length : p.key_length;
  live_keys.most_lists = segments;
  live_keys.parts = ceil_div(p.key_length, kPartKeys);
  count_mask_heads(p, live_keys);
  const int64_t mask_heads = live_keys.batches * live_keys.heads;
  live_keys.count_blocks = blocks_per_mask_head(live_keys.parts, mask_heads, 0);
  const int64_t all_parts = mask_heads * live_keys.parts, all_blocks = mask_heads * live_keys.count_blocks;
  const int64_t for_mask_heads = mask_heads * (3 * live_keys.capacity + 2 * live_keys.most_lists + 2);
  const Tensor memory =
      empty_on(like, {all_parts * (4 * kPartGroups + 1) + all_blocks * (2 * segments + 1) + for_mask_heads + 2}, ScalarType::Int);
  live_keys.groups = static_cast<int4*>(memory.data_ptr());  // first: int4 is aligned to 16 bytes, the next two to 8
  live_keys.span = reinterpret_cast<int2*>(live_keys.groups + all_parts * kPartGroups);
  live_keys.lists = live_keys.span + mask_heads * live_keys.capacity;
  live_keys.index = reinterpret_cast<int32_t*>(live_keys.lists + mask_heads * live_keys.most_lists);
  live_keys.counts = live_keys.index + mask_heads * live_keys.capacity;
  live_keys.partial = live_keys.counts + all_blocks * 2 * segments;
  live_keys.live = live_keys.partial + all_blocks;
  live_keys.count = live_keys.live + all_parts;
  live_keys.shift = live_keys.count + mask_heads;
  live_keys.tile_counter = live_keys.shift + mask_heads;
  live_keys.row_flags = live_keys.tile_counter + 1;
  DMATTN_CUDA_CHECK(options.is_one ? launch_one_list(p, live_keys, stream) : launch_live_keys(p, live_keys, stream));
  return {memory, live_keys};
}

}  // namespace dmattn::cuda
