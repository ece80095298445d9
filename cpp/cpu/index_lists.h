// The keys that index lists show to the queries of a tile, as bits: one row of them for each query.
#pragma once

#include "../limits.h"
#include "tile.h"

namespace dmattn::cpu {
namespace {

// Bit j % 32 of word j / 32 of row i: query i of the tile sees key j. Without data there are no lists.
struct ListedBits {
  uint32_t* data;
  int64_t stride;  // words in a row: 64 keys at a time can be read of the last ones
  DMATTN_INLINE uint32_t* row(int64_t i) const { return data + i * stride; }
  // Whether query i sees keys first to first + 63; first is a multiple of 32.
  DMATTN_INLINE uint64_t at(int64_t i, int64_t first) const { return load_as<uint64_t>(row(i) + first / 32); }
};

DMATTN_INLINE ListedBits take_listed_bits(Arena& arena, const AttentionParams& p) {
  if (!p.mask.index.entries.data) return {nullptr, 0};
  const int64_t stride = round_up(p.key_length, kMaxIndexBlock) / 32 + 2;
  return {arena.take<uint32_t>(tile_queries(p.mask) * stride), stride};
}

DMATTN_INLINE void set_bits(uint32_t* words, int64_t first, int64_t last) {
  for (int64_t j = first; j < last;) {
    const int64_t next = min_of(last, (j / 32 + 1) * 32);
    words[j / 32] |= bits_below<uint32_t>(next - j) << (j % 32);
    j = next;
  }
}

// Sets the bits of the keys that entries stand for. Neighbours in a list often fall into one word, so a word is kept at hand.
DMATTN_INLINE void set_entries(const int32_t* entries, int64_t count, int32_t log2_block, int64_t key_length, uint32_t* words) {
  const uint32_t limit = static_cast<uint32_t>(ceil_div(key_length, int64_t{1} << log2_block));
  if (log2_block > 5) {
    for (int64_t i = 0; i < count; ++i) {
      if (static_cast<uint32_t>(entries[i]) >= limit) continue;
      uint32_t* const to = words + (static_cast<int64_t>(entries[i]) << (log2_block - 5));
      for (int w = 0; w < 1 << (log2_block - 5); ++w) to[w] = ~0U;
    }
    return;
  }
  const uint32_t block = bits_below<uint32_t>(int64_t{1} << log2_block);
  int64_t at = 0;
  uint32_t word = words[0];
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t entry = static_cast<uint32_t>(entries[i]);
    if (entry >= limit) continue;
    const int64_t key = static_cast<int64_t>(entry) << log2_block;
    if (key / 32 != at) {
      words[at] = word;
      at = key / 32;
      word = words[at];
    }
    word |= block << (key % 32);
  }
  words[at] = word;
}

// Fills in the rows of all queries of a tile.
void list_keys(const AttentionParams& p, const QueryTile& tile, const ListedBits& bits) {
  const IndexLists& lists = p.mask.index;
  const int32_t* entries = static_cast<const int32_t*>(lists.entries.data) + head_offset(lists.entries, tile.batch, tile.head);
  const int64_t offset = lists.offset ? lists.offset[tile.batch * lists.offset_stride] : p.key_length - p.query_length;
  for (int64_t i = 0; i < tile.rows; ++i) {
    uint32_t* const words = bits.row(i);
    for (int64_t w = 0; w < bits.stride; ++w) words[w] = 0;
    const int64_t query = tile.first + i, position = query + offset;
    set_entries(entries + query * lists.row_stride, lists.count, lists.log2_block, p.key_length, words);
    set_bits(words, 0, lists.sinks);
    set_bits(words, max_of(0, position - lists.local + 1), min_of(position + 1, p.key_length));
  }
}

}  // namespace
}  // namespace dmattn::cpu
