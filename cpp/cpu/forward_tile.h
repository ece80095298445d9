// Forward of one query tile: live keys chunk by chunk through S = K Q^T, online softmax and O += P V.
#pragma once

#include "gather.h"
#include "gemm.h"
#include "softmax.h"

namespace dmattn::cpu {
namespace {

// A worker's memory for one tile.
template <class R>
struct ForwardScratch {
  Matrix<R> query_rows;    // [queries, D]
  Matrix<R> query;         // [D, queries]
  Matrix<R> key, value;    // [chunk, D], [chunk, Dv]
  Matrix<R> logits, bias;  // [chunk, queries]
  Matrix<R> out;           // [queries, Dv]
  SoftmaxState<R> state;
  R* correction;  // [queries]
  KeyLists lists;

  DMATTN_INLINE ForwardScratch(Arena& arena, const AttentionParams& p) {
    query_rows = take_matrix<R>(arena, kMaxTileQueries, p.head_dim);
    query = take_matrix<R>(arena, p.head_dim, kMaxTileQueries);
    key = take_matrix<R>(arena, chunk_keys(p), p.head_dim);
    value = take_matrix<R>(arena, chunk_keys(p), p.value_dim);
    logits = take_pairs<R>(arena, p);
    bias = p.bias.data ? take_pairs<R>(arena, p) : Matrix<R>{nullptr, 0};
    out = take_matrix<R>(arena, kMaxTileQueries, p.value_dim);
    state = {arena.take<R>(kMaxTileQueries), arena.take<R>(kMaxTileQueries)};
    correction = arena.take<R>(kMaxTileQueries);
    lists = take_key_lists(arena, p);
  }
};

template <class R>
void rescale_rows(const R* factor, int64_t rows, int64_t width, const Matrix<R>& out) {
  for (int64_t i = 0; i < rows; ++i) {
    if (factor[i] == R(1)) continue;
    for (int64_t d = 0; d < width; d += kLanes<R>) store<R>(out.row(i) + d, load<R>(out.row(i) + d) * factor[i]);
  }
}

template <class R>
void write_out(const AttentionParams& p, const QueryTile& tile, const ForwardScratch<R>& s) {
  const int64_t first = (tile.batch * p.heads + tile.head) * p.query_length + tile.first;
  R* const lse = static_cast<R*>(p.lse) + first;
  R* const lse_rest = p.lse_rest ? static_cast<R*>(p.lse_rest) + first : nullptr;
  for (int64_t i = 0; i < tile.rows; ++i) {
    const R inverse = s.state.sum[i] == 0 ? R(0) : R(1) / s.state.sum[i];
    for (int64_t d = 0; s.state.sum[i] == 0 && d < p.value_dim; ++d) s.out.row(i)[d] = 0;  // a value's NaN may have reached it
    narrow_row<R>(p.dtype, s.out.row(i), inverse, row_at(p.out, p.dtype, tile.batch, tile.head, tile.first + i), p.value_dim);
    R rest;
    lse[i] = s.state.log_sum(i, rest);
    if (lse_rest) lse_rest[i] = rest;
  }
}

template <class R>
void forward_tile(const AttentionParams& p, const Summaries& summaries, const QueryTile& tile, void* scratch) {
  Arena arena(scratch);
  const ForwardScratch<R> s(arena, p);
  const LogitTerms<R> terms = logit_terms<R>(p, tile);
  const Dropout<R> dropout(p, tile);
  const int64_t queries = padded<R>(tile.rows), value_width = padded<R>(p.value_dim);

  copy_rows<R>(p.query, p.dtype, tile.batch, tile.head, tile.first, tile.rows, p.head_dim, s.query_rows);
  transpose<R>(s.query_rows, tile.rows, p.head_dim, s.query);
  s.state.reset(queries);
  for (int64_t i = 0; i < tile.rows; ++i) {
    for (int64_t d = 0; d < value_width; ++d) s.out.row(i)[d] = 0;
  }
  for_each_chunk(p, summaries, tile, s.lists, [&](const KeyChunk& chunk) {
    gather_rows<R>(p.key, p.dtype, tile.batch, tile.kv_head, chunk.keys, chunk.count, p.head_dim, s.key);
    gather_rows<R>(p.value, p.dtype, tile.batch, tile.kv_head, chunk.keys, chunk.count, p.value_dim, s.value);
    multiply_in_pieces(chunk.count, queries, p.head_dim, static_cast<R>(p.scale), s.key, s.query, s.logits);
    finish_logits<R>(terms, chunk, tile.rows, s.logits, s.bias, Matrix<R>{nullptr, 0});
    update_softmax<R>(chunk, queries, dropout, s.state, s.correction, s.logits);
    rescale_rows<R>(s.correction, tile.rows, value_width, s.out);
    multiply(tile.rows, value_width, chunk.count, ColumnMajor<R>{s.logits.data, s.logits.stride}, s.value.data, s.value.stride,
             Accumulate<R>{s.out.data, s.out.stride, R(1)});
  });
  write_out<R>(p, tile, s);
}

}  // namespace
}  // namespace dmattn::cpu
