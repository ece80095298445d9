// Lays lists of live keys out in the workspace, and launches the kernels that fill them.
#include "find_keys.h"

#include <algorithm>

#include "runtime.h"

namespace dmattn::cuda {
namespace {

LiveKeys lay_out_lists(const KeyLists& lists, int32_t* memory) {
  LiveKeys keys;
  keys.keeps_live = lists.keeps_live, keys.joins = lists.joins, keys.lengthens = lists.lengthens;
  keys.by_lifetime = lists.by_lifetime, keys.shortest = lists.shortest;
  keys.capacity = lists.capacity, keys.most_lists = lists.most_lists;
  keys.parts = lists.parts, keys.count_blocks = lists.count_blocks;
  keys.groups = reinterpret_cast<int4*>(memory);
  keys.span = reinterpret_cast<int2*>(memory + lists.span);
  keys.lists = reinterpret_cast<int2*>(memory + lists.lists);
  keys.index = memory + lists.index;
  keys.counts = memory + lists.counts, keys.partial = memory + lists.partial, keys.live = memory + lists.live;
  keys.count = memory + lists.count, keys.shift = memory + lists.shift;
  keys.row_flags = memory + lists.tile_counter + 1;
  return keys;
}

// The mask heads of a call that may be the last part of the one that was planned, with fewer batches or heads.
template <class Lists, class Plan>
void place_mask_heads(Lists& lists, const Plan& plan, const AttentionParams& p) {
  lists.batches = std::min(plan.batches, p.batch), lists.head_divisor = plan.head_divisor;
  lists.heads = std::min(plan.heads, std::max<int64_t>(p.heads / plan.head_divisor, 1));
  lists.batch_stride = plan.batches > 1 ? lists.heads : 0;
}

}  // namespace

KeyUnions find_unions(const AttentionParams& p, const KeyUnionLists& lists, void* workspace, int first_tile,
                      int32_t* tile_counter, cudaStream_t stream) {
  KeyUnions unions;
  unions.key = lists.key.in<int32_t>(workspace), unions.seen = lists.seen.in<uint32_t>(workspace);
  unions.count = lists.count.in<int32_t>(workspace);
  unions.queries = lists.queries, unions.words = lists.words, unions.capacity = lists.capacity;
  unions.groups = lists.groups, unions.chunk = lists.chunk;
  unions.first_tile = first_tile, unions.tiles = std::min(lists.at_once, lists.tiles - first_tile);
  place_mask_heads(unions, lists, p);
  DMATTN_CUDA_CHECK(launch_key_unions(p, unions, tile_counter, stream));
  return unions;
}

QueryLists find_query_lists(const AttentionParams& p, const QueryListPlan& plan, void* workspace, cudaStream_t stream) {
  QueryLists lists;
  if (plan.tiles == 0) return lists;
  lists.entries = plan.entries.in<uint32_t>(workspace), lists.begin = plan.begin.in<int32_t>(workspace);
  lists.places = plan.places.in<int32_t>(workspace);
  lists.tiles = plan.tiles, lists.query_blocks = plan.query_blocks, lists.capacity = plan.capacity;
  place_mask_heads(lists, plan, p);
  DMATTN_CUDA_CHECK(launch_query_lists(p, lists, stream));
  return lists;
}

LiveKeys find_keys(const AttentionParams& p, const KeyLists& lists, int32_t* memory, cudaStream_t stream) {
  LiveKeys keys;
  if (lists.kind == KeyLists::Kind::kNone) return keys;
  if (lists.kind == KeyLists::Kind::kTileOrder) {
    keys.order = memory;
    DMATTN_CUDA_CHECK(launch_order(p, keys, stream));
    return keys;
  }
  if (lists.has_lists()) keys = lay_out_lists(lists, memory);
  keys.tile_counter = memory + lists.tile_counter;
  keys.batches = lists.batches, keys.heads = lists.heads, keys.head_divisor = lists.head_divisor;
  keys.batch_stride = lists.batches > 1 ? lists.heads : 0;
  if (lists.kind == KeyLists::Kind::kRanges) {
    keys.ranges = reinterpret_cast<int2*>(memory);
    keys.range_queries = lists.range_queries, keys.range_count = lists.range_count;
    DMATTN_CUDA_CHECK(launch_key_ranges(p, keys, stream));
  } else if (lists.kind == KeyLists::Kind::kOneList) {
    DMATTN_CUDA_CHECK(launch_one_list(p, keys, stream));
  } else {
    DMATTN_CUDA_CHECK(launch_live_keys(p, keys, stream));
  }
  return keys;
}

}  // namespace dmattn::cuda
