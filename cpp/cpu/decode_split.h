// Decoding one split of a sequence's keys, and adding splits up: the queries of all heads that share a key head are one tile.
//
// How keys are split depends on the cache's capacity alone, and splits are added in order. So the result for a sequence does not
// depend on the batch it is in, nor on threads.
#pragma once

#include "forward_tile.h"

namespace dmattn::cpu {
namespace {

constexpr int64_t kLeastSplitKeys = 512;  // whole chunks
constexpr int64_t kMostSplits = 16;

// The most keys that a sequence can have, or with lists the places of one.
DMATTN_INLINE int64_t most_keys(const DecodeParams& p) { return p.index.entries.data ? p.places : p.capacity; }
DMATTN_INLINE int64_t split_keys(const DecodeParams& p) {
  return max_of(kLeastSplitKeys, round_up(ceil_div(most_keys(p), kMostSplits), kChunkKeys));
}
DMATTN_INLINE int64_t splits_of(const DecodeParams& p, int64_t length) { return ceil_div(length, split_keys(p)); }

DMATTN_INLINE int64_t length_of(const DecodeParams& p, int64_t batch) {
  if (!p.lengths || (p.lengths_are_flags && p.lengths[batch] > 0)) return p.capacity;
  return max_of(0, min_of(p.lengths[batch], p.capacity));
}

// Heads whose rows are computed together: those of keys, or with lists of each list, for each query.
DMATTN_INLINE int64_t decode_heads(const DecodeParams& p) { return p.index.entries.data ? p.list_heads * p.queries : p.kv_heads; }

// Rows of such a head: query t of its group's head g is row t * group + g.
struct DecodeRows {
  int64_t batch, kv_head, group, rows, length;
  int64_t first_head, first_query;
  const int32_t* list = nullptr;  // null: there are no lists
  int32_t list_end = 0;           // the keys up to the query's position

  DMATTN_INLINE DecodeRows(const DecodeParams& p, int64_t task) : batch(task / decode_heads(p)) {
    const int64_t queries_apart = p.index.entries.data ? p.queries : 1, head = task % decode_heads(p) / queries_apart;
    const int64_t heads = decode_heads(p) / queries_apart;
    kv_head = head / (heads / p.kv_heads), group = p.heads / heads, rows = group * p.queries / queries_apart;
    first_head = head * group, first_query = task % queries_apart;
    length = p.index.entries.data ? p.places : length_of(p, batch);
    if (!p.index.entries.data) return;
    list = static_cast<const int32_t*>(p.index.entries.data) + head_offset(p.index.entries, batch, first_head) +
           first_query * p.index.row_stride;
    list_end = static_cast<int32_t>(length_of(p, batch) - p.queries + first_query + 1);
  }
  DMATTN_INLINE int64_t head_of(int64_t row) const { return first_head + row % group; }
  DMATTN_INLINE int64_t query_of(int64_t row) const { return first_query + row / group; }
  // The first key that a row does not see.
  DMATTN_INLINE int64_t end_of(const DecodeParams& p, int64_t row) const {
    return p.is_causal ? length - p.queries + query_of(row) + 1 : length;
  }
};

// The key number `at` of a row's sequence, or of its list, which may have none there: -1.
DMATTN_INLINE int64_t key_at(const DecodeParams& p, const DecodeRows& here, int64_t at) {
  if (!here.list) return at;
  const int32_t place = static_cast<int32_t>(at);
  return listed_key(p.index, listed_entry(p.index, here.list, place), here.list_end, place);
}

// Where a key of a sequence lies: its page or, without pages, the sequence, and its row there.
struct KeyPlace {
  int64_t page, row;
};
DMATTN_INLINE KeyPlace place_of(const DecodeParams& p, int64_t batch, int64_t key) {
  if (!p.page_table) return {batch, key};
  return {p.page_table[batch * p.table_stride + key / p.page_size], key % p.page_size};
}

// Is a page of the keys from `first` to last - 1, or in such places of the list, out of range?
DMATTN_INLINE bool has_bad_page(const DecodeParams& p, const DecodeRows& here, int64_t first, int64_t last) {
  if (!p.page_table) return false;
  for (int64_t at = first; at < last; at = here.list ? at + 1 : round_up(at + 1, p.page_size)) {
    const int64_t key = key_at(p, here, at);
    if (key < 0) continue;
    const int64_t page = place_of(p, here.batch, key).page;
    if (page < 0 || page >= p.pages) return true;
  }
  return false;
}

constexpr int kBadPage = -1;  // in place of a split's sum: one of its page numbers is out of range

// What splits hand on: for each row the sum of weights and weighted values relative to a maximum.
template <class R>
struct DecodeShared {
  int64_t splits, rows, stride;
  R *max, *sum;  // [B, heads, splits, rows]
  R* out;        // [B, heads, splits, rows, stride]

  DMATTN_INLINE DecodeShared(Arena& arena, const DecodeParams& p) {
    splits = splits_of(p, most_keys(p)), rows = p.heads * p.queries / decode_heads(p), stride = padded<R>(p.value_dim);
    const int64_t all = p.batch * decode_heads(p) * splits * rows;
    max = arena.take<R>(all), sum = arena.take<R>(all), out = arena.take<R>(all * stride);
  }
  DMATTN_INLINE int64_t at(int64_t head, int64_t split, int64_t row) const { return (head * splits + split) * rows + row; }
};

// A worker's memory for one tile.
template <class R>
struct DecodeScratch {
  Matrix<R> query_rows, query;  // [rows, D], [D, rows]
  Matrix<R> key, value;         // [chunk, D], [chunk, Dv]
  Matrix<R> logits;             // [chunk, rows]
  Matrix<R> out;                // [rows, Dv]
  SoftmaxState<R> state;
  R* correction;  // [rows]
  KeyChunk* chunk;
  int64_t* keys;  // [chunk], of the sequence; -1 for none

  DMATTN_INLINE DecodeScratch(Arena& arena, const DecodeParams& p) {
    query_rows = take_matrix<R>(arena, kMaxTileQueries, p.head_dim);
    query = take_matrix<R>(arena, p.head_dim, kMaxTileQueries);
    key = take_matrix<R>(arena, kChunkKeys, p.head_dim);
    value = take_matrix<R>(arena, kChunkKeys, p.value_dim);
    logits = take_matrix<R>(arena, kChunkKeys, kMaxTileQueries);
    out = take_matrix<R>(arena, kMaxTileQueries, p.value_dim);
    state = {arena.take<R>(kMaxTileQueries), arena.take<R>(kMaxTileQueries)};
    correction = arena.take<R>(kMaxTileQueries);
    chunk = arena.take<KeyChunk>(1);
    keys = arena.take<int64_t>(kChunkKeys);
  }
};

// to[k] = the row of keys[k], zeros where there is none
template <class R>
void copy_cache_rows(const DecodeParams& p, const TensorView& rows, const DecodeRows& here, const int64_t* keys, int64_t count,
                     int64_t width, const Matrix<R>& to) {
  const int64_t whole = padded<R>(width);
  with_stored(p.dtype, R(), [&](auto stored) {
    for (int64_t k = 0; k < count; ++k) {
      if (keys[k] < 0) {
        for (int64_t d = 0; d < whole; ++d) to.row(k)[d] = 0;
        continue;
      }
      const KeyPlace place = place_of(p, here.batch, keys[k]);
      widen_row<decltype(stored)>(row_at(rows, p.dtype, place.page, here.kv_head, place.row), to.row(k), width, whole);
    }
  });
}

// Products of `keys`, which are first, first + 1, ... or listed ones, with rows first_row, ... to logits.
template <class R>
void finish_decode_logits(const DecodeParams& p, const DecodeRows& here, const int64_t* keys, int64_t first, int64_t count,
                          int64_t first_row, int64_t rows, const Matrix<R>& logits) {
  if (p.softcap > 0) cap<R>(static_cast<R>(p.softcap), count, padded<R>(rows), logits, Matrix<R>{nullptr, 0});
  for (int64_t i = 0; p.key_bias.data && i < rows; ++i) {
    const R* bias = static_cast<const R*>(p.key_bias.data) + head_offset(p.key_bias, here.batch, here.head_of(first_row + i));
    for (int64_t k = 0; k < count; ++k) logits.row(k)[i] += keys[k] < 0 ? R(0) : bias[keys[k]];
  }
  for (int64_t k = 0; here.list && k < count; ++k) {
    for (int64_t i = 0; keys[k] < 0 && i < rows; ++i) logits.row(k)[i] = static_cast<R>(-kInfinity);
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k = max_of(0, here.end_of(p, first_row + i) - first); k < count; ++k) {
      logits.row(k)[i] = static_cast<R>(-kInfinity);
    }
  }
}

DMATTN_INLINE int64_t decode_tiles(const DecodeParams& p) {
  return ceil_div(p.heads * p.queries / decode_heads(p), kMaxTileQueries);
}

// One task = one tile of rows and one split of the keys of one (batch, head).
template <class R>
void decode_split_task(const DecodeParams& p, const DecodeShared<R>& shared, int64_t task, void* scratch) {
  const int64_t tiles = decode_tiles(p), split = task / tiles % shared.splits, head = task / tiles / shared.splits;
  const DecodeRows here(p, head);
  const int64_t first_row = task % tiles * kMaxTileQueries, rows = min_of(kMaxTileQueries, here.rows - first_row);
  const int64_t first = split * split_keys(p), last = min_of(first + split_keys(p), here.length);
  if (first >= last) return;
  const int64_t at = shared.at(head, split, first_row);
  if (has_bad_page(p, here, first, last)) {
    for (int64_t i = 0; i < rows; ++i) shared.sum[at + i] = kBadPage;
    return;
  }
  Arena arena(scratch);
  const DecodeScratch<R> s(arena, p);
  const Dropout<R> no_dropout(AttentionParams{}, QueryTile{});
  const int64_t width = padded<R>(rows), value_width = padded<R>(p.value_dim);

  // Load the queries, transposed.
  with_stored(p.dtype, R(), [&](auto stored) {
    for (int64_t i = 0; i < rows; ++i) {
      const char* from = row_at(p.query, p.dtype, here.batch, here.head_of(first_row + i), here.query_of(first_row + i));
      widen_row<decltype(stored)>(from, s.query_rows.row(i), p.head_dim, padded<R>(p.head_dim));
    }
  });
  transpose<R>(s.query_rows, rows, p.head_dim, s.query);
  s.state.reset(width);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t d = 0; d < value_width; ++d) s.out.row(i)[d] = 0;
  }
  // Add up the chunks.
  for (int64_t key = first; key < last; key += kChunkKeys) {
    KeyChunk& chunk = *s.chunk;
    chunk.count = min_of(kChunkKeys, last - key);
    for (int64_t k = 0; k < chunk.count; ++k) s.keys[k] = key_at(p, here, key + k);
    copy_cache_rows<R>(p, p.key, here, s.keys, chunk.count, p.head_dim, s.key);
    copy_cache_rows<R>(p, p.value, here, s.keys, chunk.count, p.value_dim, s.value);
    multiply_in_pieces(chunk.count, width, p.head_dim, static_cast<R>(p.scale), s.key, s.query, s.logits);
    finish_decode_logits<R>(p, here, s.keys, key, chunk.count, first_row, rows, s.logits);
    update_softmax<R>(chunk, width, no_dropout, s.state, s.correction, s.logits);
    rescale_rows<R>(s.correction, rows, value_width, s.out);
    multiply(rows, value_width, chunk.count, ColumnMajor<R>{s.logits.data, s.logits.stride}, s.value.data, s.value.stride,
             Accumulate<R>{s.out.data, s.out.stride, R(1)});
  }
  // Hand them on.
  for (int64_t i = 0; i < rows; ++i) {
    shared.max[at + i] = s.state.max[i], shared.sum[at + i] = s.state.sum[i];
    R* const to = shared.out + (at + i) * shared.stride;
    for (int64_t d = 0; d < value_width; d += kLanes<R>) store<R>(to + d, load<R>(s.out.row(i) + d));
  }
}

// exp of one number.
template <class R>
DMATTN_INLINE R exp_once(R x) {
  return exp_of<R>(splat<R>(x))[0];
}

// One task = all rows of one (batch, head): adds up its splits, and the sink to the sum of weights.
template <class R>
void merge_splits_task(const DecodeParams& p, const DecodeShared<R>& shared, int64_t task, void* scratch) {
  const R lowest = static_cast<R>(-kInfinity);
  const DecodeRows here(p, task);
  Arena arena(scratch);
  R* const out = arena.take<R>(kMaxWidth);
  const int64_t splits = splits_of(p, here.length);
  for (int64_t row = 0; row < here.rows; ++row) {
    const int64_t head = here.head_of(row), query = here.query_of(row);
    // Find the largest logit.
    R largest = lowest;
    bool is_empty = true, is_bad = false;
    for (int64_t split = 0; split < splits; ++split) {
      const int64_t at = shared.at(task, split, row);
      is_bad |= shared.sum[at] == kBadPage;
      if (shared.sum[at] == 0 || shared.sum[at] == kBadPage) continue;
      is_empty = false;
      largest = shared.max[at] > largest ? shared.max[at] : largest;
    }
    // Add up what the splits found, relative to it.
    R sum = 0, rest = 0;
    for (int64_t d = 0; d < shared.stride; ++d) out[d] = 0;
    for (int64_t split = 0; split < splits && !is_empty && !is_bad; ++split) {
      const int64_t at = shared.at(task, split, row);
      if (shared.sum[at] == 0) continue;  // a value's NaN may have reached its sums
      const R weight = exp_once<R>(shared.max[at] - largest);
      sum += shared.sum[at] * weight;
      const R* const part = shared.out + at * shared.stride;
      for (int64_t d = 0; d < shared.stride; d += kLanes<R>) store<R>(out + d, load<R>(out + d) + load<R>(part + d) * weight);
    }
    if (is_bad) sum = 0;
    const SoftmaxState<R> state{&largest, &sum};
    static_cast<R*>(p.lse)[(here.batch * p.heads + head) * p.queries + query] = state.log_sum(0, rest);
    // Normalise. A sink may be far above every logit.
    R factor = sum == 0 ? R(0) : R(1) / sum;
    if (p.sinks && sum != 0) {
      const R sink = static_cast<const R*>(p.sinks)[head], top = sink > largest ? sink : largest;
      const R weight = exp_once<R>(largest - top);
      factor = weight / (sum * weight + exp_once<R>(sink - top));
    }
    narrow_row<R>(p.dtype, out, factor, row_at(p.out, p.dtype, here.batch, head, query), p.value_dim);
  }
}

}  // namespace
}  // namespace dmattn::cpu
