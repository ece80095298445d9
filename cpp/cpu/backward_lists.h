// Backward of a tile whose queries have index lists: a few queries at a time, whose keys are read, and whose gradients are added,
// where they lie.
#pragma once

#include "bias_grad.h"
#include "list_rows.h"

namespace dmattn::cpu {
namespace {

// Where one task adds up grad_key and grad_value.
template <class R>
struct KeySums {
  Matrix<R> key, value;  // [Sk, D], [Sk, Dv]
};

// The gradients that are added up here, or null.
template <class R>
struct ListGrads {
  const KeySums<R>* sums;  // null: grad_bias alone is wanted
  R* key_bias;             // of the tile's first head
  int64_t key_bias_stride;
  bool adds_bias;
};

// differentiate_softmax for one row.
template <class R>
DMATTN_INLINE void differentiate_row(const KeyChunk& chunk, const RowDropout<R>& dropout, R lse, R lse_rest, R delta,
                                     R* probability, R* grad_logit) {
  for (int64_t k = 0; k < padded<R>(chunk.count); k += kLanes<R>) {
    const PairGradient<R> pair(load<R>(probability + k) - lse - lse_rest, load<R>(grad_logit + k), delta - Vec<R>{},
                               dropout.scale.active, dropout.scale.active ? dropout.scales(chunk.keys + k) : Vec<R>{});
    store<R>(probability + k, pair.dropped);
    store<R>(grad_logit + k, pair.grad);
  }
}

template <class R>
void add_list_bias_grads(const BackwardCall& c, const ListTile& tile, const KeyChunk& chunk, const Matrix<R>& grad_logit,
                         const ListGrads<R>& to) {
  const int64_t length = c.params.forward.key_length;
  for (int64_t i = 0; i < tile.rows(); ++i) {
    const int64_t head = i / tile.tile.rows;
    const R* const grad = grad_logit.row(i);
    R* const sums = to.key_bias ? to.key_bias + head * to.key_bias_stride : nullptr;
    for (int64_t k = 0; sums && k < chunk.count; ++k) sums[chunk.keys[k]] += grad[k];
    if (!to.adds_bias) continue;
    R* const row = bias_grad_rows<R>(c, tile.of_head(head)) + i % tile.tile.rows * length;
    for (int64_t k = 0; k < chunk.count; ++k) row[chunk.keys[k]] += grad[k];
  }
}

template <class R>
void load_list_rows(const BackwardParams& b, const ListTile& tile, const BackwardScratch<R>& s) {
  const AttentionParams& p = b.forward;
  for (int64_t i = 0; i < tile.heads; ++i) {
    const int64_t row = i * tile.tile.rows;
    BackwardScratch<R> head = s;
    head.query_rows = from_row(s.query_rows, row), head.grad_out_rows = from_row(s.grad_out_rows, row);
    head.lse += row, head.lse_rest += row, head.delta += row;
    load_rows<R>(b, tile.of_head(i), head);
  }
  clear(s.grad_query, 0, tile.rows(), padded<R>(p.head_dim));
}

template <class R>
void backward_list_part(const BackwardCall& c, const Summaries& summaries, const ListTile& tile, const KeyLists& lists,
                        const int32_t* numbers, const ListGrads<R>& to, const BackwardScratch<R>& s) {
  const BackwardParams& b = c.params;
  const AttentionParams& p = b.forward;
  const int64_t rows = tile.rows(), width = padded<R>(p.head_dim), value_width = padded<R>(p.value_dim);
  load_list_rows<R>(b, tile, s);
  for_each_chunk(p, summaries, tile.tile, lists, [&](const KeyChunk& chunk) {
    const GatheredRows<const R> key = rows_of<R>(p.key, p, tile.tile, chunk, p.head_dim, s.key, numbers);
    const GatheredRows<const R> value = rows_of<R>(p.value, p, tile.tile, chunk, p.value_dim, s.value, numbers);
    for_each_row_block<R>(rows, [&](int64_t i, auto count) {
      constexpr int kRows = decltype(count)::kRows;
      dot_rows<kRows, R>(from_row(s.query_rows, i), key, chunk.count, width, static_cast<R>(p.scale), from_row(s.probability, i));
      dot_rows<kRows, R>(from_row(s.grad_out_rows, i), value, chunk.count, value_width, R(1), from_row(s.grad_logit, i));
    });
    finish_list_logits<R>(p, tile, chunk, s.probability, s.slope);
    for (int64_t i = 0; i < rows; ++i) {
      differentiate_row<R>(chunk, RowDropout<R>(p, tile, i), s.lse[i], s.lse_rest[i], s.delta[i], s.probability.row(i),
                           s.grad_logit.row(i));
    }
    if (to.key_bias || to.adds_bias) add_list_bias_grads<R>(c, tile, chunk, s.grad_logit, to);
    if (!to.sums) return;
    if (p.softcap > 0) apply_slope<R>(rows, padded<R>(chunk.count), s);
    for_each_row_block<R>(rows, [&](int64_t i, auto count) {
      constexpr int kRows = decltype(count)::kRows;
      scatter_rows<kRows, R>(from_row(s.probability, i), from_row(s.grad_out_rows, i), chunk.count, value_width, R(1),
                             {to.sums->value.data, to.sums->value.stride, chunk.keys});
      scatter_rows<kRows, R>(from_row(s.grad_logit, i), from_row(s.query_rows, i), chunk.count, width, static_cast<R>(p.scale),
                             {to.sums->key.data, to.sums->key.stride, chunk.keys});
      add_rows<kRows, R>(from_row(s.grad_logit, i), key, chunk.count, width, from_row(s.grad_query, i));
    });
  });
  for (int64_t i = 0; to.sums && i < tile.heads; ++i) write_query_grads<R>(b, tile.of_head(i), i * tile.tile.rows, s);
}

template <class R>
void backward_list_tile(const BackwardCall& c, const Summaries& summaries, const ListTile& tile, const ListGrads<R>& to,
                        const BackwardScratch<R>& s) {
  int32_t numbers[kListChunkKeys];
  for (int32_t k = 0; k < kListChunkKeys; ++k) numbers[k] = k;
  for_each_list_tile(c.params.forward, tile, s.lists, [&](const ListTile& part, const KeyLists& lists) {
    backward_list_part<R>(c, summaries, part, lists, numbers, to, s);
  });
}

}  // namespace
}  // namespace dmattn::cpu
