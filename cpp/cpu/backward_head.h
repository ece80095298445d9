// Backward of one (batch, kv head): grad_query tile by tile; grad_key and grad_value added up over the heads of the group and
// their tiles, in order.
//
// With fewer heads than workers the tiles of a head are dealt out to several parts, each with its own sums; a later phase adds
// those in order. Sums are rows of whole vectors in fp32 or fp64. Where grad_key and grad_value are such rows, and with one part,
// the sums are grad_key and grad_value themselves.
#pragma once

#include "backward_lists.h"

namespace dmattn::cpu {
namespace {

constexpr int64_t kMaxPartBytes = int64_t{1} << 28;  // upper bound on the sums of all parts

// The fewest parts per group that keep workers busy at least three quarters of the time.
DMATTN_INLINE int64_t useful_parts(int64_t groups, int64_t workers) {
  int64_t parts = ceil_div(workers, groups);
  while (groups * parts * 4 < round_up(groups * parts, workers) * 3) ++parts;
  return parts;
}

// What all tasks of a backward call see.
template <class R>
struct BackwardShared {
  Summaries summaries;
  R* key_bias_sums;          // [B, Hkv, parts, key_bias_rows, Sk]; null: not wanted
  R *key_sums, *value_sums;  // [B, Hkv, parts, Sk, stride]; null: one part
  int64_t parts, key_stride, value_stride;
  bool adds_bias_grad;  // grad_bias is added up in phase 1
  bool direct;          // are the sums grad_key and grad_value themselves?

  DMATTN_INLINE BackwardShared(Arena& arena, const BackwardCall& c) {
    const AttentionParams& p = c.params.forward;
    const int64_t groups = p.batch * p.kv_heads;
    key_stride = padded<R>(p.head_dim), value_stride = padded<R>(p.value_dim);
    const int64_t bytes_each = groups * p.key_length * (key_stride + value_stride) * static_cast<int64_t>(sizeof(R));
    const int64_t most = min_of(query_tiles(p) * group_size(p), kMaxPartBytes / max_of(1, bytes_each));
    parts = groups == 0 ? 1 : max_of(1, min_of(useful_parts(groups, c.workers), most));
    adds_bias_grad = c.params.grad_bias && owns_bias(c, parts);
    const bool whole_rows = key_stride == p.head_dim && value_stride == p.value_dim;
    direct = parts == 1 && whole_rows && element_size(p.dtype) == static_cast<int64_t>(sizeof(R));
    summaries = take_summaries(arena, p);
    key_bias_sums = c.params.grad_key_bias ? arena.take<R>(groups * parts * key_bias_rows(p) * p.key_length) : nullptr;
    key_sums = parts > 1 ? arena.take<R>(groups * parts * p.key_length * key_stride) : nullptr;
    value_sums = parts > 1 ? arena.take<R>(groups * parts * p.key_length * value_stride) : nullptr;
  }
};

template <class R>
DMATTN_INLINE KeySums<R> take_key_sums(const BackwardCall& c, const BackwardShared<R>& shared, int64_t batch, int64_t kv_head,
                                       int64_t task, Arena& arena) {
  const BackwardParams& b = c.params;
  const int64_t length = b.forward.key_length;
  if (shared.direct) {
    return {{reinterpret_cast<R*>(row_at(b.grad_key, b.forward.dtype, batch, kv_head, 0)), b.grad_key.row_stride},
            {reinterpret_cast<R*>(row_at(b.grad_value, b.forward.dtype, batch, kv_head, 0)), b.grad_value.row_stride}};
  }
  if (shared.parts > 1) {
    return {{shared.key_sums + task * length * shared.key_stride, shared.key_stride},
            {shared.value_sums + task * length * shared.value_stride, shared.value_stride}};
  }
  R* key = arena.take<R>(length * shared.key_stride);
  return {{key, shared.key_stride}, {arena.take<R>(length * shared.value_stride), shared.value_stride}};
}

template <class R>
void write_key_grads(const BackwardParams& b, int64_t batch, int64_t kv_head, int64_t first, int64_t last,
                     const KeySums<R>& sums) {
  const AttentionParams& p = b.forward;
  for (int64_t j = first; j < last; ++j) {
    narrow_row<R>(p.dtype, sums.key.row(j), R(1), row_at(b.grad_key, p.dtype, batch, kv_head, j), p.head_dim);
    narrow_row<R>(p.dtype, sums.value.row(j), R(1), row_at(b.grad_value, p.dtype, batch, kv_head, j), p.value_dim);
  }
}

// Computes all gradients of a query tile.
template <class R>
void backward_tile(const BackwardCall& c, const BackwardShared<R>& shared, const QueryTile& tile, const KeySums<R>& sums,
                   R* key_bias_sums, const BackwardScratch<R>& s) {
  const BackwardParams& b = c.params;
  const AttentionParams& p = b.forward;
  const LogitTerms<R> terms = logit_terms<R>(p, tile);
  const Dropout<R> dropout(p, tile);
  const int64_t queries = padded<R>(tile.rows), width = padded<R>(p.head_dim), value_width = padded<R>(p.value_dim);
  load_tile<R>(b, tile, s);
  for_each_chunk(p, shared.summaries, tile, s.lists, [&](const KeyChunk& chunk) {
    differentiate_chunk<R>(b, tile, terms, dropout, chunk, s);
    if (key_bias_sums) add_key_bias_grad<R>(chunk, queries, s.grad_logit, key_bias_sums);
    if (shared.adds_bias_grad) add_bias_grad<R>(chunk, tile.rows, p.key_length, s.grad_logit, bias_grad_rows<R>(c, tile));
    if (terms.softcap > 0) apply_slope<R>(chunk.count, queries, s);
    multiply(chunk.count, value_width, tile.rows, RowMajor<R>{s.probability.data, s.probability.stride}, s.grad_out_rows.data,
             s.grad_out_rows.stride, AccumulateAt<R>{sums.value.data, sums.value.stride, chunk.keys, R(1)});
    multiply(chunk.count, width, tile.rows, RowMajor<R>{s.grad_logit.data, s.grad_logit.stride}, s.query_rows.data,
             s.query_rows.stride, AccumulateAt<R>{sums.key.data, sums.key.stride, chunk.keys, static_cast<R>(p.scale)});
    multiply(tile.rows, width, chunk.count, ColumnMajor<R>{s.grad_logit.data, s.grad_logit.stride}, s.key.data, s.key.stride,
             Accumulate<R>{s.grad_query.data, s.grad_query.stride, R(1)});
  });
  write_query_grads<R>(b, tile, 0, s);
}

// One task = one part of one (batch, kv head): every parts-th tile of the group's heads.
template <class R>
void backward_task(const BackwardCall& c, const BackwardShared<R>& shared, int64_t task, void* scratch) {
  const AttentionParams& p = c.params.forward;
  const int64_t part = task % shared.parts, batch = task / shared.parts / p.kv_heads, kv_head = task / shared.parts % p.kv_heads;
  const int64_t tiles = query_tiles(p), sets = joint_sets(p), bias_rows = key_bias_rows(p);
  Arena arena(scratch);
  const BackwardScratch<R> s(arena, p);
  const KeySums<R> sums = take_key_sums<R>(c, shared, batch, kv_head, task, arena);
  clear(sums.key, 0, p.key_length, shared.key_stride);
  clear(sums.value, 0, p.key_length, shared.value_stride);
  R* key_bias_sums = shared.key_bias_sums ? shared.key_bias_sums + task * bias_rows * p.key_length : nullptr;
  for (int64_t j = 0; key_bias_sums && j < bias_rows * p.key_length; ++j) key_bias_sums[j] = 0;
  for (int64_t set = 0; set < sets; ++set) {
    for (int64_t t = 0; t < tiles; ++t) {
      if ((set * tiles + t) % shared.parts != part) continue;
      const ListTile tile = list_tile(p, batch, kv_head, set, t);
      const int64_t stride = bias_rows > 1 ? p.key_length : 0;
      R* const head_sums = key_bias_sums ? key_bias_sums + set * joint_heads(p) * stride : nullptr;
      if (p.mask.index.entries.data) {
        backward_list_tile<R>(c, shared.summaries, tile, {&sums, head_sums, stride, shared.adds_bias_grad}, s);
      } else {
        backward_tile<R>(c, shared, tile.tile, sums, head_sums, s);
      }
    }
  }
  if (!shared.direct && shared.parts == 1) write_key_grads<R>(c.params, batch, kv_head, 0, p.key_length, sums);
}

// One task = one tile of one shared bias.
template <class R>
void shared_bias_task(const BackwardCall& c, const Summaries& summaries, int64_t task, void* scratch) {
  Arena arena(scratch);
  const BackwardScratch<R> s(arena, c.params.forward);
  for_each_bias_tile(c, task, [&](const QueryTile& tile) {
    if (c.params.forward.mask.index.entries.data) {
      backward_list_tile<R>(c, summaries, ListTile{tile, 1}, {nullptr, nullptr, 0, true}, s);
    } else {
      bias_grad_tile<R>(c, summaries, tile, s);
    }
  });
}

DMATTN_INLINE int64_t reduce_blocks(const AttentionParams& p) { return ceil_div(p.key_length, kReduceKeys); }

// One task = kReduceKeys keys of one (batch, kv head): adds the other parts' sums to the first part's and writes them.
template <class R>
void reduce_parts_task(const BackwardCall& c, const BackwardShared<R>& shared, int64_t task) {
  const AttentionParams& p = c.params.forward;
  const int64_t blocks = reduce_blocks(p), group = task / blocks;
  const int64_t first = task % blocks * kReduceKeys, last = min_of(first + kReduceKeys, p.key_length);
  const int64_t key_size = p.key_length * shared.key_stride, value_size = p.key_length * shared.value_stride;
  const KeySums<R> sums = {{shared.key_sums + group * shared.parts * key_size, shared.key_stride},
                           {shared.value_sums + group * shared.parts * value_size, shared.value_stride}};
  for (int64_t part = 1; part < shared.parts; ++part) {
    for (int64_t i = first * shared.key_stride; i < last * shared.key_stride; ++i)
      sums.key.data[i] += sums.key.data[part * key_size + i];
    for (int64_t i = first * shared.value_stride; i < last * shared.value_stride; ++i) {
      sums.value.data[i] += sums.value.data[part * value_size + i];
    }
  }
  write_key_grads<R>(c.params, group / p.kv_heads, group % p.kv_heads, first, last, sums);
}

}  // namespace
}  // namespace dmattn::cpu
