// What the loss of an indexer asks of a key, on the CPU and on CUDA alike: whether a query sees it, and whether it competes.
#pragma once

#include "params.h"

namespace dmattn {

// The columns of logits, in whole blocks.
DMATTN_HOST_DEVICE static inline int64_t index_loss_stride(const IndexLossParams& p) {
  const int64_t whole = p.blocks << p.log2_block;
  return whole > p.keys ? whole : p.keys;
}

// A query of an IndexLossParams.
struct IndexLossRow {
  int64_t position, key_length;
  const int32_t *list, *start, *end;  // the blocks in its list, null: all keys; those of its group
  int32_t log2_block, local, sinks;
  bool is_causal, is_padding;
};

DMATTN_HOST_DEVICE static inline const int32_t* of_group(const PerHead& given, int64_t batch, int64_t group) {
  if (!given.data) return nullptr;
  return static_cast<const int32_t*>(given.data) + batch * given.batch_stride + group / given.head_divisor * given.head_stride;
}

DMATTN_HOST_DEVICE static inline IndexLossRow index_loss_row(const IndexLossParams& p, int64_t batch, int64_t group,
                                                             int64_t row) {
  IndexLossRow made{};
  made.position = p.positions[row], made.key_length = p.key_length;
  const int32_t* const lists = of_group(p.lists, batch, group);
  made.list = lists ? lists + row * p.blocks : nullptr;
  made.start = of_group(p.start, batch, group), made.end = of_group(p.end, batch, group);
  made.log2_block = p.log2_block, made.local = p.local, made.sinks = p.sinks, made.is_causal = p.is_causal;
  const bool is_inside = made.position >= 0 && made.position < p.key_length;
  made.is_padding = is_inside && ((made.start && made.start[made.position] > made.position) ||
                                  (made.end && made.end[made.position] <= made.position));
  return made;
}

// The key in a column of logits; there is none, if it is negative or beyond the last.
DMATTN_HOST_DEVICE static inline int64_t key_of_column(const IndexLossRow& row, int64_t column) {
  if (!row.list) return column;
  const int64_t block = row.list[column >> row.log2_block];
  return block < 0 ? -1 : (block << row.log2_block) + (column & ((int64_t{1} << row.log2_block) - 1));
}

DMATTN_HOST_DEVICE static inline bool sees(const IndexLossRow& row, int64_t key) {
  if (row.is_padding || key < 0 || key >= row.key_length || (row.is_causal && key > row.position)) return false;
  return (!row.start || row.start[key] <= row.position) && (!row.end || row.position < row.end[key]);
}

// Whether a key that it sees competes.
DMATTN_HOST_DEVICE static inline bool competes(const IndexLossRow& row, int64_t key) {
  return key >= row.sinks && (key > row.position || key <= row.position - row.local);
}

// From the query to what the slope is multiplied with: the key in a column of products, or the middle of the block.
template <class R>
DMATTN_HOST_DEVICE static inline R distance_of(const IndexLossRow& row, int64_t column, bool is_pooled) {
  const int log2_width = is_pooled ? row.log2_block : 0;
  const int64_t first = key_of_column(row, column << log2_width);
  return static_cast<R>(first - row.position) + static_cast<R>((int64_t{1} << log2_width) - 1) / 2;
}

}  // namespace dmattn
