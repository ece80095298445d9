// Lays lists of live keys out in the workspace, and launches the kernels that fill them.
#include "find_keys.h"

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

}  // namespace

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
