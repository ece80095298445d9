// Backward of one query tile as far as the gradients of logits: reads the tile once, then turns each chunk of live keys into
// probabilities and gradients of logits.
#pragma once

#include "gather.h"
#include "gemm.h"
#include "kernels.h"
#include "softmax.h"

namespace dmattn::cpu {
namespace {

// A worker's memory for one tile.
template <class R>
struct BackwardScratch {
  Matrix<R> query_rows, query;        // [queries, D], and transposed
  Matrix<R> grad_out_rows, grad_out;  // [queries, Dv], and transposed
  Matrix<R> key, value;               // [chunk, D], [chunk, Dv]
  Matrix<R> probability, grad_logit;  // [chunk, queries]
  Matrix<R> bias, slope;              // [chunk, queries], without data when there is no bias or softcap
  Matrix<R> grad_query;               // [queries, D]
  R *lse, *lse_rest, *delta;          // [queries]
  KeyLists lists;

  DMATTN_INLINE BackwardScratch(Arena& arena, const AttentionParams& p) {
    query_rows = take_matrix<R>(arena, kMaxTileQueries, p.head_dim);
    query = take_matrix<R>(arena, p.head_dim, kMaxTileQueries);
    grad_out_rows = take_matrix<R>(arena, kMaxTileQueries, p.value_dim);
    grad_out = take_matrix<R>(arena, p.value_dim, kMaxTileQueries);
    key = take_matrix<R>(arena, chunk_keys(p), p.head_dim);
    value = take_matrix<R>(arena, chunk_keys(p), p.value_dim);
    probability = take_pairs<R>(arena, p);
    grad_logit = take_pairs<R>(arena, p);
    bias = p.bias.data ? take_pairs<R>(arena, p) : Matrix<R>{nullptr, 0};
    slope = p.softcap > 0 ? take_pairs<R>(arena, p) : Matrix<R>{nullptr, 0};
    grad_query = take_matrix<R>(arena, kMaxTileQueries, p.head_dim);
    lse = arena.take<R>(kMaxTileQueries);
    lse_rest = arena.take<R>(kMaxTileQueries);
    delta = arena.take<R>(kMaxTileQueries);
    lists = take_key_lists(arena, p);
  }
};

template <class R>
DMATTN_INLINE void clear(const Matrix<R>& m, int64_t first, int64_t last, int64_t columns) {
  for (int64_t i = first; i < last; ++i) {
    for (int64_t d = 0; d < columns; ++d) m.row(i)[d] = 0;
  }
}

// Fills in lse and delta = <grad_out, out> - grad_lse of each query. A query that saw nothing has zero gradients whatever its
// rows hold, so its rows become zero, and its lse +inf, which makes every probability 0.
template <class R>
void load_row_terms(const BackwardParams& b, const QueryTile& tile, const BackwardScratch<R>& s) {
  const AttentionParams& p = b.forward;
  const int64_t first = (tile.batch * p.heads + tile.head) * p.query_length + tile.first, value_width = padded<R>(p.value_dim);
  const R* lse = static_cast<const R*>(p.lse) + first;
  const R* lse_rest = p.lse_rest ? static_cast<const R*>(p.lse_rest) + first : nullptr;
  const R* grad_lse = b.grad_lse ? static_cast<const R*>(b.grad_lse) + first : nullptr;
  for (int64_t i = 0; i < padded<R>(tile.rows); ++i) {
    s.delta[i] = s.lse_rest[i] = 0;
    s.lse[i] = static_cast<R>(kInfinity);
    if (i >= tile.rows) continue;
    if (lse[i] == static_cast<R>(-kInfinity)) {
      clear(s.query_rows, i, i + 1, p.head_dim);
      clear(s.grad_out_rows, i, i + 1, p.value_dim);
      continue;
    }
    const char* out_row = row_at(p.out, p.dtype, tile.batch, tile.head, tile.first + i);
    R out[kMaxWidth];
    with_stored(p.dtype, R(), [&](auto stored) { widen_row<decltype(stored)>(out_row, out, p.value_dim, value_width); });
    Vec<R> products = {};
    for (int64_t d = 0; d < value_width; d += kLanes<R>) products += load<R>(out + d) * load<R>(s.grad_out_rows.row(i) + d);
    s.lse[i] = lse[i];
    s.lse_rest[i] = lse_rest ? lse_rest[i] : R(0);
    s.delta[i] = sum_lanes<R>(products) - (grad_lse ? grad_lse[i] : R(0));
  }
}

template <class R>
void load_rows(const BackwardParams& b, const QueryTile& tile, const BackwardScratch<R>& s) {
  const AttentionParams& p = b.forward;
  copy_rows<R>(p.query, p.dtype, tile.batch, tile.head, tile.first, tile.rows, p.head_dim, s.query_rows);
  copy_rows<R>(b.grad_out, p.dtype, tile.batch, tile.head, tile.first, tile.rows, p.value_dim, s.grad_out_rows);
  load_row_terms<R>(b, tile, s);
}

template <class R>
void load_tile(const BackwardParams& b, const QueryTile& tile, const BackwardScratch<R>& s) {
  const AttentionParams& p = b.forward;
  load_rows<R>(b, tile, s);
  transpose<R>(s.query_rows, tile.rows, p.head_dim, s.query);
  transpose<R>(s.grad_out_rows, tile.rows, p.value_dim, s.grad_out);
  clear(s.grad_query, 0, tile.rows, padded<R>(p.head_dim));
}

// The rows of a tile in grad_query; they begin with row first_row of the scratch.
template <class R>
void write_query_grads(const BackwardParams& b, const QueryTile& tile, int64_t first_row, const BackwardScratch<R>& s) {
  const AttentionParams& p = b.forward;
  for (int64_t i = 0; i < tile.rows; ++i) {
    const int64_t row = first_row + i;
    // The query sees nothing: NaN of keys that other queries see must not reach it.
    if (s.lse[row] == static_cast<R>(kInfinity)) clear(s.grad_query, row, row + 1, p.head_dim);
    narrow_row<R>(p.dtype, s.grad_query.row(row), static_cast<R>(p.scale),
                  row_at(b.grad_query, p.dtype, tile.batch, tile.head, tile.first + i), p.head_dim);
  }
}

// Of pairs of queries and keys, in a vector: the probability after dropout, and the gradient of the logit P (dP - delta).
template <class R>
struct PairGradient {
  Vec<R> dropped, grad;

  // exponent: logit - lse. grad_probability: dP, of the probability after dropout. scale: that of dropout, if it is active.
  DMATTN_INLINE PairGradient(Vec<R> exponent, Vec<R> grad_probability, Vec<R> delta, bool is_dropout, Vec<R> scale) {
    // Never above 1, whatever rounding did to a large logit.
    const Vec<R> probability = exp_of<R>(exponent > R(0) ? Vec<R>{} : exponent);
    dropped = probability;
    if (is_dropout) {
      grad_probability = scale == R(0) ? Vec<R>{} : grad_probability * scale;
      dropped *= scale;
    }
    const Vec<R> slope = probability * (grad_probability - delta);
    grad = probability == R(0) ? Vec<R>{} : slope;
  }
};

// In place, logits become probabilities P after dropout, and their gradients dP become those of the logits, P (dP - delta).
template <class R>
void differentiate_softmax(const KeyChunk& chunk, int64_t width, const Dropout<R>& dropout, const BackwardScratch<R>& s) {
  for (int64_t k = 0; k < chunk.count; ++k) {
    R *probability_row = s.probability.row(k), *grad_row = s.grad_logit.row(k);
    for (int64_t i = 0; i < width; i += kLanes<R>) {
      const PairGradient<R> pair(load<R>(probability_row + i) - load<R>(s.lse + i) - load<R>(s.lse_rest + i),
                                 load<R>(grad_row + i), load<R>(s.delta + i), dropout.active,
                                 dropout.active ? dropout.scales(chunk.keys[k], i) : Vec<R>{});
      store<R>(probability_row + i, pair.dropped);
      store<R>(grad_row + i, pair.grad);
    }
  }
}

// Gathers a chunk and leaves probabilities and gradients of logits [chunk, queries] in the scratch, the latter without the slope
// of softcap.
template <class R>
void differentiate_chunk(const BackwardParams& b, const QueryTile& tile, const LogitTerms<R>& terms, const Dropout<R>& dropout,
                         const KeyChunk& chunk, const BackwardScratch<R>& s) {
  const AttentionParams& p = b.forward;
  const int64_t queries = padded<R>(tile.rows);
  gather_rows<R>(p.key, p.dtype, tile.batch, tile.kv_head, chunk.keys, chunk.count, p.head_dim, s.key);
  gather_rows<R>(p.value, p.dtype, tile.batch, tile.kv_head, chunk.keys, chunk.count, p.value_dim, s.value);
  multiply_in_pieces(chunk.count, queries, p.head_dim, static_cast<R>(p.scale), s.key, s.query, s.probability);
  multiply_in_pieces(chunk.count, queries, p.value_dim, R(1), s.value, s.grad_out, s.grad_logit);
  finish_logits<R>(terms, chunk, tile.rows, s.probability, s.bias, s.slope);
  differentiate_softmax<R>(chunk, queries, dropout, s);
}

template <class R>
void apply_slope(int64_t rows, int64_t width, const BackwardScratch<R>& s) {
  for (int64_t k = 0; k < rows; ++k) {
    for (int64_t i = 0; i < width; i += kLanes<R>) {
      store<R>(s.grad_logit.row(k) + i, load<R>(s.grad_logit.row(k) + i) * load<R>(s.slope.row(k) + i));
    }
  }
}

}  // namespace
}  // namespace dmattn::cpu
