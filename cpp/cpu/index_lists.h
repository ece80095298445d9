// The keys that index lists show to a few queries: a byte for each key, a bit of it for each query.
//
// Setting bits makes one set of the lists whatever their order, and puts duplicates together.
#pragma once

#include "../limits.h"
#include "tile.h"

namespace dmattn::cpu {
namespace {

constexpr int64_t kLineKeys = 64;
constexpr int64_t kListQueries = 8;  // at most so many queries at once: the bits of a byte

// Bit i of byte j: query i sees key j. A line is 64 bytes; those whose byte in `lines` is 0 are all 0.
struct ListedKeys {
  uint8_t *bytes, *lines;  // null: there are no lists
  int64_t count;           // lines
};

DMATTN_INLINE ListedKeys take_listed_keys(Arena& arena, const AttentionParams& p) {
  if (!p.mask.index.entries.data) return {nullptr, nullptr, 0};
  const int64_t lines =
      round_up(p.key_length, kMaxIndexBlock) / kLineKeys + 1;  // blocks are whole, 64 bytes can be read anywhere
  uint8_t* const bytes = arena.take<uint8_t>(lines * kLineKeys);
  return {bytes, arena.take<uint8_t>(lines), lines};
}

DMATTN_INLINE void clear_listed_keys(const ListedKeys& listed) {
  __builtin_memset(listed.bytes, 0, static_cast<size_t>(listed.count * kLineKeys));
  __builtin_memset(listed.lines, 0, static_cast<size_t>(listed.count));
}

// Which of 64 bytes have one of the bits that are asked for.
DMATTN_INLINE uint64_t bytes_with(const uint8_t* bytes, uint8_t wanted) {
  uint64_t result = 0;
#if defined(__AVX512BW__)
  result = _mm512_test_epi8_mask(_mm512_loadu_si512(bytes), _mm512_set1_epi8(static_cast<char>(wanted)));
#elif defined(__AVX2__)
  const __m256i bits = _mm256_set1_epi8(static_cast<char>(wanted));
  for (int i = 0; i < 2; ++i) {
    const __m256i found = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes) + i), bits);
    const int none = _mm256_movemask_epi8(_mm256_cmpeq_epi8(found, _mm256_setzero_si256()));
    result |= uint64_t{~static_cast<uint32_t>(none)} << (32 * i);
  }
#elif defined(__SSE2__)
  const __m128i bits = _mm_set1_epi8(static_cast<char>(wanted));
  for (int i = 0; i < 4; ++i) {
    const __m128i found = _mm_and_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes) + i), bits);
    const int none = _mm_movemask_epi8(_mm_cmpeq_epi8(found, _mm_setzero_si128()));
    result |= uint64_t{static_cast<uint16_t>(~none)} << (16 * i);
  }
#else
  for (int i = 0; i < kLineKeys; ++i) result |= uint64_t{(bytes[i] & wanted) != 0} << i;
#endif
  return result;
}

// The keys of a range; there are lines for all of them.
DMATTN_INLINE void list_range(const ListedKeys& listed, uint8_t query, int64_t first, int64_t last) {
  for (int64_t j = first; j < last; ++j) listed.bytes[j] |= query;
  for (int64_t line = first / kLineKeys; line < ceil_div(last, kLineKeys) && first < last; ++line) listed.lines[line] = 1;
}

// The keys that entries stand for.
template <int kBlock>
DMATTN_INLINE void list_entries(const int32_t* entries, int64_t count, int64_t key_length, const ListedKeys& listed,
                                uint8_t query) {
  const uint32_t limit = static_cast<uint32_t>(ceil_div(key_length, kBlock));
  uint8_t *const bytes = listed.bytes, *const lines = listed.lines;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t entry = static_cast<uint32_t>(entries[i]);
    if (entry >= limit) continue;
    const int64_t first = int64_t{entry} * kBlock;
    for (int64_t j = first; j < first + kBlock; ++j) bytes[j] |= query;
    for (int64_t j = first; j < first + kBlock; j += kLineKeys) lines[j / kLineKeys] = 1;
  }
}

DMATTN_INLINE void list_entries(const IndexLists& lists, const int32_t* entries, int64_t key_length, const ListedKeys& listed,
                                uint8_t query) {
  switch (lists.log2_block) {
    case 0: return list_entries<1>(entries, lists.count, key_length, listed, query);
    case 1: return list_entries<2>(entries, lists.count, key_length, listed, query);
    case 2: return list_entries<4>(entries, lists.count, key_length, listed, query);
    case 3: return list_entries<8>(entries, lists.count, key_length, listed, query);
    case 4: return list_entries<16>(entries, lists.count, key_length, listed, query);
    case 5: return list_entries<32>(entries, lists.count, key_length, listed, query);
    case 6: return list_entries<64>(entries, lists.count, key_length, listed, query);
    default: return list_entries<128>(entries, lists.count, key_length, listed, query);
  }
}

// The list of one query whose first `count` entries are distinct blocks in ascending order and whose others list nothing, as
// top-k selection makes it: its keys can be read from it, without a set of them. count < 0: the list has another form.
struct AscendingList {
  const int32_t* entries = nullptr;
  int64_t count = -1;
};

DMATTN_INLINE int64_t count_below(const int32_t* entries, int64_t count, uint32_t limit) {
  int32_t below = 0;
  for (int64_t i = 0; i < count; ++i) below += static_cast<uint32_t>(entries[i]) < limit;
  return below;
}

DMATTN_INLINE AscendingList ascending_list(const AttentionParams& p, const QueryTile& tile) {
  const MaskParams& mask = p.mask;
  if (mask.start.data || mask.end.data || mask.tiles.data) return {};
  const int32_t* const entries = static_cast<const int32_t*>(mask.index.entries.data) +
                                 head_offset(mask.index.entries, tile.batch, tile.head) + tile.first * mask.index.row_stride;
  const int64_t blocks = ceil_div(p.key_length, int64_t{1} << mask.index.log2_block);
  const int64_t count = count_below(entries, mask.index.count, static_cast<uint32_t>(blocks));
  int32_t wrong = 0;
  for (int64_t i = 1; i < count; ++i) wrong |= entries[i - 1] >= entries[i];
  if (count > 0) wrong |= static_cast<uint32_t>(entries[0]) >= blocks || entries[count - 1] >= blocks;
  return {entries, wrong ? -1 : count};
}

// The position of a tile's first query, from which its local window counts.
DMATTN_INLINE int64_t list_position(const AttentionParams& p, const QueryTile& tile) {
  const IndexLists& lists = p.mask.index;
  return tile.first + (lists.offset ? lists.offset[tile.batch * lists.offset_stride] : p.key_length - p.query_length);
}

// Fills in what all queries of a tile, at most kListQueries, see.
void list_keys(const AttentionParams& p, const QueryTile& tile, const ListedKeys& listed) {
  for (int64_t line = 0; line < listed.count; ++line) {
    if (!listed.lines[line]) continue;
    __builtin_memset(listed.bytes + line * kLineKeys, 0, kLineKeys);
    listed.lines[line] = 0;
  }
  const IndexLists& lists = p.mask.index;
  const int32_t* entries = static_cast<const int32_t*>(lists.entries.data) + head_offset(lists.entries, tile.batch, tile.head);
  const int64_t first_position = list_position(p, tile);
  for (int64_t i = 0; i < tile.rows; ++i) {
    const int64_t position = first_position + i;
    const uint8_t query = static_cast<uint8_t>(1U << i);
    list_entries(lists, entries + (tile.first + i) * lists.row_stride, p.key_length, listed, query);
    list_range(listed, query, 0, lists.sinks);
    list_range(listed, query, max_of(0, position - lists.local + 1), min_of(position + 1, p.key_length));
  }
}

}  // namespace
}  // namespace dmattn::cpu
