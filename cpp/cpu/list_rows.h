// What forward and backward of queries with index lists share: rows are few, (query, head) of a tile, and lanes are keys.
//
// A query that picks its own keys shares few of them with its neighbours, so a large tile would compute many pairs in vain. The
// rows here are those of one to kListRows queries and of the heads that share their lists. Row i is query i % T of head i / T of
// the tile's T queries.
#pragma once

#include "gather.h"
#include "gathered.h"
#include "softmax.h"

namespace dmattn::cpu {
namespace {

constexpr int64_t kListRows = 4;  // queries are joined up to so many rows
static_assert(kListRows <= kListQueries && kListRows <= kListHeads);
// The cost of one key that a tile reads, and of one pair of it and a row.
constexpr int64_t kReadCost = 2, kPairCost = 1;

// Do all heads of a group see the same keys?
DMATTN_INLINE bool heads_share_mask(const AttentionParams& p) {
  const PerHead* const views[] = {&p.mask.start, &p.mask.end, &p.mask.tiles, &p.mask.index.entries};
  for (const PerHead* view : views) {
    if (view->data && view->head_stride != 0 && view->head_divisor == 1) return false;
  }
  return true;
}

// Heads of a group that are computed together: one, where there are no lists.
DMATTN_INLINE int64_t joint_heads(const AttentionParams& p) {
  const int64_t group = p.kv_heads > 0 ? p.heads / p.kv_heads : 1;
  return p.mask.index.entries.data && heads_share_mask(p) ? max_of(1, min_of(group, kListHeads)) : 1;
}

DMATTN_INLINE int64_t joint_sets(const AttentionParams& p) {
  return p.kv_heads > 0 ? ceil_div(p.heads / p.kv_heads, joint_heads(p)) : 1;
}

// The tile of some queries of several heads; tile.head is the first of them.
struct ListTile {
  QueryTile tile;
  int64_t heads;
  DMATTN_INLINE int64_t rows() const { return heads * tile.rows; }
  DMATTN_INLINE QueryTile of_head(int64_t i) const {
    QueryTile one = tile;
    one.head += i;
    return one;
  }
};

// Tile t of set number `set` of a kv head.
DMATTN_INLINE ListTile list_tile(const AttentionParams& p, int64_t batch, int64_t kv_head, int64_t set, int64_t t) {
  const int64_t group = p.heads / p.kv_heads, first = set * joint_heads(p);
  return {query_tile(p, batch, kv_head * group + first, t), min_of(joint_heads(p), group - first)};
}

DMATTN_INLINE QueryTile part_of(const QueryTile& tile, int64_t first, int64_t rows) {
  return {tile.batch, tile.head, tile.kv_head, tile.first + first, rows, tile.position + first};
}

// Do queries of a tile share so many keys that computing them together is cheaper than one by one?
DMATTN_INLINE bool is_joined_cheaper(const ListedKeys& listed, int64_t queries, int64_t heads) {
  int64_t together = 0, each = 0;
  for (int64_t line = 0; line < listed.count; ++line) {
    if (!listed.lines[line]) continue;
    const uint8_t* const bytes = listed.bytes + line * kLineKeys;
    together += __builtin_popcountll(bytes_with(bytes, 0xff));
    for (int64_t i = 0; i < queries; ++i) each += __builtin_popcountll(bytes_with(bytes, static_cast<uint8_t>(1U << i)));
  }
  return together * (kReadCost + queries * heads * kPairCost) < each * (kReadCost + heads * kPairCost);
}

// Calls use(tile, lists) for parts of a tile of queries, with the lists of each part.
template <class Use>
DMATTN_INLINE void for_each_list_tile(const AttentionParams& p, const ListTile& whole, const KeyLists& lists, const Use& use) {
  const int64_t most = max_of(1, kListRows / whole.heads);
  clear_listed_keys(lists.listed);
  for (int64_t first = 0; first < whole.tile.rows; first += most) {
    const int64_t queries = min_of(most, whole.tile.rows - first);
    KeyLists here = lists;
    if (queries > 1) list_keys(p, part_of(whole.tile, first, queries), lists.listed);
    const int64_t step = queries > 1 && is_joined_cheaper(lists.listed, queries, whole.heads) ? queries : 1;
    for (int64_t i = 0; i < queries; i += step) {
      const QueryTile part = part_of(whole.tile, first + i, step);
      here.first_listed = i;
      here.alone = step == 1 ? ascending_list(p, part) : AscendingList();
      if (queries == 1 && here.alone.count < 0) list_keys(p, part, lists.listed);
      use(ListTile{part, whole.heads}, here);
    }
  }
}

// The rows of key or value of a chunk: where they lie, or copied to scratch memory if they are not whole vectors of R.
template <class R>
DMATTN_INLINE GatheredRows<const R> rows_of(const TensorView& tensor, const AttentionParams& p, const QueryTile& tile,
                                            const KeyChunk& chunk, int64_t width, const Matrix<R>& room, const int32_t* numbers) {
  if (element_size(p.dtype) == static_cast<int64_t>(sizeof(R)) && width == padded<R>(width)) {
    return {reinterpret_cast<const R*>(row_at(tensor, p.dtype, tile.batch, tile.kv_head, 0)), tensor.row_stride, chunk.keys};
  }
  gather_rows<R>(tensor, p.dtype, tile.batch, tile.kv_head, chunk.keys, padded<R>(chunk.count), width, room);
  return {room.data, room.stride, numbers};
}

// Adds the biases of one row to its logits.
template <class R>
DMATTN_INLINE void add_biases(const LogitTerms<R>& terms, int64_t query, const KeyChunk& chunk, R* logits) {
  if (terms.key_bias) {
    for (int64_t k = 0; k < chunk.count; ++k) logits[k] += terms.key_bias[chunk.keys[k]];
  }
  if (!terms.bias) return;
  with_stored(terms.bias_type, R(), [&](auto stored) {
    const auto* row = reinterpret_cast<const typename decltype(stored)::Element*>(terms.bias) + query * terms.bias_stride;
    for (int64_t k = 0; k < chunk.count; ++k) logits[k] += stored.widen(row[chunk.keys[k]]);
  });
}

// -inf for the keys that query t of the tile does not see, and behind the last key.
template <class R>
DMATTN_INLINE void hide_keys(const KeyChunk& chunk, int64_t t, R* logits) {
  for (int64_t k = chunk.full; k < chunk.count; ++k) {
    if (!((chunk.masks[k].words[0] >> t) & 1U)) logits[k] = static_cast<R>(-kInfinity);
  }
  for (int64_t k = chunk.count; k < padded<R>(chunk.count); ++k) logits[k] = static_cast<R>(-kInfinity);
}

// Products [rows, keys] to logits, in place; slope as in cap, without data when not wanted.
template <class R>
void finish_list_logits(const AttentionParams& p, const ListTile& tile, const KeyChunk& chunk, const Matrix<R>& logits,
                        const Matrix<R>& slope) {
  if (p.softcap > 0) cap<R>(static_cast<R>(p.softcap), tile.rows(), padded<R>(chunk.count), logits, slope);
  for (int64_t i = 0; i < tile.rows(); ++i) {
    const int64_t t = i % tile.tile.rows;
    const LogitTerms<R> terms = logit_terms<R>(p, tile.of_head(i / tile.tile.rows));
    add_biases<R>(terms, t, chunk, logits.row(i));
    hide_keys<R>(chunk, t, logits.row(i));
  }
}

// Which weights of one row dropout keeps.
template <class R>
struct RowDropout {
  DropoutScale<R> scale;
  uint32_t row_key;

  DMATTN_INLINE RowDropout(const AttentionParams& p, const ListTile& tile, int64_t row) : scale(p), row_key(0) {
    if (!scale.active) return;
    const QueryTile one = tile.of_head(row / tile.tile.rows);
    row_key = dropout_row_key(static_cast<uint64_t>(*p.dropout_seed), static_cast<uint32_t>(one.batch * p.heads + one.head),
                              static_cast<uint32_t>(one.first + row % one.rows));
  }
  // For a vector of keys: factor where the key is kept, otherwise 0.
  DMATTN_INLINE Vec<R> scales(const int32_t* keys) const {
    HashWords<R> x;
    __builtin_memcpy(&x, keys, sizeof(x));
    return scale.of(x * 0x9e3779b9U ^ row_key);
  }
};

}  // namespace
}  // namespace dmattn::cpu
