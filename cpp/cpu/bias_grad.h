// Gradients of key_bias and bias: sums of gradients of logits, also over the batches and heads that share a bias, always in the
// same order.
//
// key_bias: every part of backward has its own sums, which a later phase adds up. bias: a task adds directly where no other task
// adds to the same elements. Where batches or kv heads share one bias, a phase of its own computes the gradients of logits again,
// bias by bias.
#pragma once

#include "backward_tile.h"

namespace dmattn::cpu {
namespace {

DMATTN_INLINE int64_t group_size(const AttentionParams& p) { return p.kv_heads > 0 ? p.heads / p.kv_heads : 1; }

// How many rows of key_bias the query heads of a group have: one for each, or one for all.
DMATTN_INLINE int64_t key_bias_rows(const AttentionParams& p) { return p.key_bias.head_divisor == 1 ? group_size(p) : 1; }

// Does no element of grad_bias get adds from two tasks of phase 1? Parts of a group may have the same queries of different heads.
DMATTN_INLINE bool owns_bias(const BackwardCall& c, int64_t parts) {
  const AttentionParams& p = c.params.forward;
  return c.bias_batches == p.batch && (p.bias.head_divisor == 1 || (p.bias.head_divisor == group_size(p) && parts == 1));
}

// For the keys of a chunk: sums[key] += the sum over queries of the gradients of logits. Lanes of padding hold 0.
template <class R>
void add_key_bias_grad(const KeyChunk& chunk, int64_t width, const Matrix<R>& grad_logit, R* sums) {
  for (int64_t k = 0; k < chunk.count; ++k) {
    Vec<R> sum = load<R>(grad_logit.row(k));
    for (int64_t i = kLanes<R>; i < width; i += kLanes<R>) sum += load<R>(grad_logit.row(k) + i);
    sums[chunk.keys[k]] += sum_lanes<R>(sum);
  }
}

// The rows of a tile in grad_bias [bias batches, bias heads, Sq, Sk].
template <class R>
DMATTN_INLINE R* bias_grad_rows(const BackwardCall& c, const QueryTile& tile) {
  const AttentionParams& p = c.params.forward;
  const int64_t heads = p.heads / p.bias.head_divisor, batch = c.bias_batches == 1 ? 0 : tile.batch;
  const int64_t row = (batch * heads + tile.head / p.bias.head_divisor) * p.query_length + tile.first;
  return static_cast<R*>(c.params.grad_bias) + row * p.key_length;
}

template <class R>
void add_bias_grad(const KeyChunk& chunk, int64_t rows, int64_t key_length, const Matrix<R>& grad_logit, R* sums) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k = 0; k < chunk.count; ++k) sums[i * key_length + chunk.keys[k]] += grad_logit.row(k)[i];
  }
}

DMATTN_INLINE int64_t shared_bias_tasks(const BackwardCall& c, int64_t parts) {
  const AttentionParams& p = c.params.forward;
  if (!c.params.grad_bias || owns_bias(c, parts) || p.heads == 0) return 0;
  return c.bias_batches * (p.heads / p.bias.head_divisor) * query_tiles(p);
}

// Adds up the gradients of logits of one tile in grad_bias.
template <class R>
void bias_grad_tile(const BackwardCall& c, const Summaries& summaries, const QueryTile& tile, const BackwardScratch<R>& s) {
  const AttentionParams& p = c.params.forward;
  const LogitTerms<R> terms = logit_terms<R>(p, tile);
  const Dropout<R> dropout(p, tile);
  load_tile<R>(c.params, tile, s);
  for_each_chunk(p, summaries, tile, s.lists, [&](const KeyChunk& chunk) {
    differentiate_chunk<R>(c.params, tile, terms, dropout, chunk, s);
    add_bias_grad<R>(chunk, tile.rows, p.key_length, s.grad_logit, bias_grad_rows<R>(c, tile));
  });
}

// Calls use(tile) for the tiles of all batches and heads that share one tile of a bias.
template <class Use>
DMATTN_INLINE void for_each_bias_tile(const BackwardCall& c, int64_t task, const Use& use) {
  const AttentionParams& p = c.params.forward;
  const int64_t tiles = query_tiles(p), heads = p.heads / p.bias.head_divisor;
  const int64_t bias_row = task / tiles, first_head = bias_row % heads * p.bias.head_divisor;
  const int64_t first_batch = bias_row / heads, last_batch = c.bias_batches == 1 ? p.batch : first_batch + 1;
  for (int64_t batch = first_batch; batch < last_batch; ++batch) {
    for (int64_t head = first_head; head < first_head + p.bias.head_divisor; ++head) {
      use(query_tile(p, batch, head, tiles - 1 - task % tiles));
    }
  }
}

// Adds up the sums [B, Hkv, parts, key_bias_rows, Sk] of key_bias. One task = one row of grad_key_bias.
template <class R>
void reduce_key_bias_task(const BackwardCall& c, int64_t parts, const R* sums, int64_t task) {
  const AttentionParams& p = c.params.forward;
  const int64_t heads = p.heads / p.key_bias.head_divisor, group = group_size(p), rows = key_bias_rows(p);
  const int64_t first_batch = task / heads, last_batch = c.key_bias_batches == 1 ? p.batch : first_batch + 1;
  const int64_t first_head = task % heads * p.key_bias.head_divisor, last_head = first_head + p.key_bias.head_divisor;
  R* to = static_cast<R*>(c.params.grad_key_bias) + task * p.key_length;
  for (int64_t batch = first_batch; batch < last_batch; ++batch) {
    for (int64_t kv_head = first_head / group; kv_head <= (last_head - 1) / group; ++kv_head) {
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t row = ((batch * p.kv_heads + kv_head) * parts + part) * rows + (rows == 1 ? 0 : first_head % group);
        for (int64_t j = 0; j < p.key_length; ++j) to[j] += sums[row * p.key_length + j];
      }
    }
  }
}

}  // namespace
}  // namespace dmattn::cpu
