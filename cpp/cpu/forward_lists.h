// Forward of a tile whose queries have index lists: a few queries at a time, whose keys are read where they lie.
#pragma once

#include "forward_tile.h"
#include "list_rows.h"

namespace dmattn::cpu {
namespace {

// update_softmax for one row of logits; gives the factor for its older sums.
template <class R>
DMATTN_INLINE R update_row_softmax(const KeyChunk& chunk, const RowDropout<R>& dropout, R& row_max, R& row_sum, R* logits) {
  const int64_t width = padded<R>(chunk.count);
  Vec<R> largest = splat<R>(row_max);
  for (int64_t k = 0; k < width; k += kLanes<R>) largest = max_of<R>(load<R>(logits + k), largest);
  const R max = max_lanes<R>(largest);
  const R base = max == static_cast<R>(-kInfinity) ? R(0) : max;
  Vec<R> sum = {};
  for (int64_t k = 0; k < width; k += kLanes<R>) {
    const Vec<R> probability = exp_of<R>(load<R>(logits + k) - base);
    sum += probability;
    store<R>(logits + k, dropout.scale.active ? probability * dropout.scales(chunk.keys + k) : probability);
  }
  const R correction = exp_of<R>(splat<R>(row_max - base))[0];
  row_sum = row_sum * correction + sum_lanes<R>(sum);
  row_max = max;
  return correction;
}

template <class R>
void forward_list_part(const AttentionParams& p, const Summaries& summaries, const ListTile& tile, const KeyLists& lists,
                       const int32_t* numbers, const ForwardScratch<R>& s) {
  const int64_t queries = tile.tile.rows, width = padded<R>(p.head_dim), value_width = padded<R>(p.value_dim);
  for (int64_t i = 0; i < tile.heads; ++i) {
    copy_rows<R>(p.query, p.dtype, tile.tile.batch, tile.tile.head + i, tile.tile.first, queries, p.head_dim,
                 from_row(s.query_rows, i * queries));
  }
  s.state.reset(tile.rows());
  for (int64_t i = 0; i < tile.rows(); ++i) {
    for (int64_t d = 0; d < value_width; ++d) s.out.row(i)[d] = 0;
  }
  for_each_chunk(p, summaries, tile.tile, lists, [&](const KeyChunk& chunk) {
    const GatheredRows<const R> key = rows_of<R>(p.key, p, tile.tile, chunk, p.head_dim, s.key, numbers);
    const GatheredRows<const R> value = rows_of<R>(p.value, p, tile.tile, chunk, p.value_dim, s.value, numbers);
    for_each_row_block<R>(tile.rows(), [&](int64_t i, auto count) {
      dot_rows<decltype(count)::kRows, R>(from_row(s.query_rows, i), key, chunk.count, width, static_cast<R>(p.scale),
                                          from_row(s.logits, i));
    });
    finish_list_logits<R>(p, tile, chunk, s.logits, Matrix<R>{nullptr, 0});
    for (int64_t i = 0; i < tile.rows(); ++i) {
      s.correction[i] = update_row_softmax<R>(chunk, RowDropout<R>(p, tile, i), s.state.max[i], s.state.sum[i], s.logits.row(i));
    }
    rescale_rows<R>(s.correction, tile.rows(), value_width, s.out);
    for_each_row_block<R>(tile.rows(), [&](int64_t i, auto count) {
      add_rows<decltype(count)::kRows, R>(from_row(s.logits, i), value, chunk.count, value_width, from_row(s.out, i));
    });
  });
  for (int64_t i = 0; i < tile.heads; ++i) {
    ForwardScratch<R> head = s;
    head.out = from_row(s.out, i * queries);
    head.state.max += i * queries, head.state.sum += i * queries;
    write_out<R>(p, tile.of_head(i), head);
  }
}

template <class R>
void forward_list_tile(const AttentionParams& p, const Summaries& summaries, const ListTile& tile, void* scratch) {
  Arena arena(scratch);
  const ForwardScratch<R> s(arena, p);
  int32_t numbers[kListChunkKeys];
  for (int32_t k = 0; k < kListChunkKeys; ++k) numbers[k] = k;
  for_each_list_tile(p, tile, s.lists, [&](const ListTile& part, const KeyLists& lists) {
    forward_list_part<R>(p, summaries, part, lists, numbers, s);
  });
}

}  // namespace
}  // namespace dmattn::cpu
