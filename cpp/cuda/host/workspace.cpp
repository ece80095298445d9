// How large lists of live keys are, and where their pieces lie.
#include "workspace.h"

#include <algorithm>

namespace dmattn::cuda {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Finds out how many mask heads there are, and which a head has.
KeyLists with_mask_heads(const AttentionParams& p, KeyLists::Kind kind) {
  const PerHead &start = p.mask.start, &end = p.mask.end;
  KeyLists lists;
  lists.kind = kind;
  lists.head_divisor = p.heads;
  for (const PerHead* row : {&start, &end}) {
    if (row->data && row->head_divisor < lists.head_divisor) lists.head_divisor = row->head_divisor;
  }
  lists.heads = p.heads / lists.head_divisor;
  lists.batches = start.batch_stride != 0 || end.batch_stride != 0 ? p.batch : 1;
  return lists;
}

}  // namespace

KeyLists plan_lists(const AttentionParams& p, const KeyListOptions& options) {
  KeyLists lists = with_mask_heads(p, options.is_one ? KeyLists::Kind::kOneList : KeyLists::Kind::kLists);
  lists.keeps_live = options.keeps_live, lists.joins = options.joins, lists.lengthens = options.lengthens;
  lists.by_lifetime = options.by_lifetime, lists.shortest = options.shortest;
  while (options.is_one && segments_at(static_cast<int>(p.query_length), lists.shortest) > 1) ++lists.shortest;
  const int64_t segments = segments_at(static_cast<int>(p.query_length), lists.shortest);
  // The live keys are themselves the list of a single segment.
  lists.capacity = segments > 1 ? kEntriesPerKey * p.key_length : p.key_length;
  lists.most_lists = segments;
  lists.parts = ceil_div(p.key_length, kPartKeys);
  const int64_t mask_heads = lists.batches * lists.heads;
  lists.count_blocks = blocks_per_mask_head(lists.parts, mask_heads, 0);
  const int64_t all_parts = mask_heads * lists.parts, all_blocks = mask_heads * lists.count_blocks;
  // The groups come first, of int4, which is aligned to 16 bytes; then span and lists, of int2.
  const auto add = [&](int64_t elements) { return lists.elements += elements, lists.elements - elements; };
  add(all_parts * kPartGroups * 4);
  lists.span = add(mask_heads * lists.capacity * 2);
  lists.lists = add(mask_heads * lists.most_lists * 2);
  lists.index = add(mask_heads * lists.capacity);
  lists.counts = add(all_blocks * 2 * segments);
  lists.partial = add(all_blocks);
  lists.live = add(all_parts);
  lists.count = add(mask_heads);
  lists.shift = add(mask_heads);
  lists.tile_counter = add(2);  // and row_flags
  return lists;
}

KeyLists plan_ranges(const AttentionParams& p, int queries) {
  KeyLists lists = with_mask_heads(p, KeyLists::Kind::kRanges);
  lists.range_queries = queries;
  lists.range_count = ceil_div(p.query_length, queries);
  lists.tile_counter = 2 * lists.batches * lists.heads * lists.range_count;
  lists.elements = lists.tile_counter + 1;
  return lists;
}

KeyUnionLists plan_unions(const AttentionParams& p, int64_t queries, int64_t& bytes) {
  constexpr int64_t kMostBytes = int64_t{512} << 20, kLeastTiles = 2048;  // so many tiles of all heads keep a GPU busy
  const IndexLists& lists = p.mask.index;
  KeyUnionLists unions;
  unions.queries = static_cast<int>(queries), unions.words = static_cast<int>(ceil_div(queries, 32));
  unions.tiles = static_cast<int>(ceil_div(p.query_length, queries));
  unions.head_divisor = p.heads;
  const MaskParams& mask = p.mask;
  for (const PerHead* row : {&lists.entries, &mask.start, &mask.end, &mask.tiles}) {
    if (!row->data) continue;
    unions.head_divisor = std::min(unions.head_divisor, row->head_divisor);
    if (row->batch_stride != 0) unions.batches = p.batch;
  }
  if (lists.offset_stride != 0) unions.batches = p.batch;
  unions.heads = std::max<int64_t>(p.heads / unions.head_divisor, 1);
  // Every query may list other keys.
  const int64_t local = lists.local > 0 ? lists.local + queries : 0;
  unions.capacity = std::clamp<int64_t>((queries * lists.count << lists.log2_block) + local + lists.sinks, 1, p.key_length);
  const int64_t mask_heads = unions.batches * unions.heads, list_bytes = unions.capacity * 4 * (1 + unions.words);
  const int64_t fit = kMostBytes / std::max<int64_t>(mask_heads * list_bytes, 1),
                least = ceil_div(kLeastTiles, p.batch * p.heads);
  unions.at_once = static_cast<int>(std::min<int64_t>(std::max(fit, least), unions.tiles));
  const int64_t rounds = ceil_div(unions.tiles, unions.at_once);
  unions.at_once = static_cast<int>(ceil_div(unions.tiles, rounds));
  unions.seen = add_region(bytes, unions.lists_at_once() * unions.capacity * 4 * unions.words);
  unions.key = add_region(bytes, unions.lists_at_once() * unions.capacity * 4);
  unions.count = add_region(bytes, unions.lists_at_once() * 4);
  return unions;
}

namespace {

// Entries of a head's lists, at most: every query may list other blocks.
int64_t query_list_capacity(const AttentionParams& p) {
  const IndexLists& index = p.mask.index;
  const int64_t tiles = ceil_div(p.key_length, kListedTileKeys);
  const int64_t local = index.local > 0 ? ceil_div(index.local, kListedTileKeys) + 1 : 0;
  return p.query_length * std::min(index.count + local + ceil_div(index.sinks, kListedTileKeys), tiles);
}

}  // namespace

bool fits_query_lists(const AttentionParams& p) {
  return p.query_length < int64_t{kNoListedQuery} && query_list_capacity(p) < int64_t{1} << 31;
}

QueryListPlan plan_query_lists(const AttentionParams& p, int64_t& bytes) {
  QueryListPlan lists;
  lists.tiles = static_cast<int>(ceil_div(p.key_length, kListedTileKeys));
  lists.query_blocks = static_cast<int>(ceil_div(p.query_length, kListQueries));
  lists.capacity = std::max<int64_t>(query_list_capacity(p), 1);
  const PerHead& entries = p.mask.index.entries;
  lists.head_divisor = std::min(p.heads, entries.head_divisor);
  lists.heads = p.heads / lists.head_divisor;
  lists.batches = entries.batch_stride != 0 || p.mask.index.offset_stride != 0 ? p.batch : 1;
  const int64_t mask_heads = lists.batches * lists.heads;
  lists.entries = add_region(bytes, mask_heads * lists.capacity * 4);
  lists.begin = add_region(bytes, mask_heads * (lists.tiles + 1) * 4);
  lists.places = add_region(bytes, mask_heads * lists.tiles * lists.query_blocks * 4);
  return lists;
}

KeyLists plan_tile_order(const AttentionParams& p) {
  constexpr int64_t kFewTiles = 512;
  const int64_t tiles = p.batch * p.heads * ceil_div(p.query_length, kQueryPadding);
  KeyLists lists;
  if (tiles <= kFewTiles) return lists;
  lists.kind = KeyLists::Kind::kTileOrder;
  lists.elements = tiles;
  return lists;
}

}  // namespace dmattn::cuda
