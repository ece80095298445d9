// How queries are cut into tiles, and how a worker's scratch memory is cut into matrices.
#pragma once

#include "convert.h"
#include "limits.h"

namespace dmattn::cpu {
namespace {

// The queries of a tile: at most kMaxTileQueries, or kListTileQueries with index lists, and a divisor of a block mask's tile_q,
// which is a multiple of 32.
DMATTN_INLINE int64_t tile_queries(const MaskParams& mask) {
  int64_t size = mask.index.entries.data ? kListTileQueries : kMaxTileQueries;
  while (mask.tiles.data && mask.tile_q % size != 0) size -= 32;
  return size;
}

// The keys of a chunk, at most.
DMATTN_INLINE int64_t chunk_keys(const AttentionParams& p) { return p.mask.index.entries.data ? kListChunkKeys : kChunkKeys; }

DMATTN_INLINE int64_t query_tiles(const AttentionParams& p) { return ceil_div(p.query_length, tile_queries(p.mask)); }

// Queries [first, first + rows) of one head. `position` is that of query `first`.
struct QueryTile {
  int64_t batch, head, kv_head, first, rows, position;
};

DMATTN_INLINE QueryTile query_tile(const AttentionParams& p, int64_t batch, int64_t head, int64_t tile) {
  const int64_t size = tile_queries(p.mask), first = tile * size;
  return {batch,
          head,
          head / (p.heads / p.kv_heads),
          first,
          min_of(size, p.query_length - first),
          first + p.key_length - p.query_length};
}

DMATTN_INLINE int64_t head_offset(const PerHead& view, int64_t batch, int64_t head) {
  return batch * view.batch_stride + (head / view.head_divisor) * view.head_stride;
}

// Hands out pieces of a block of memory, each on a cache line of its own. With null memory it only measures.
class Arena {
 public:
  DMATTN_INLINE explicit Arena(void* memory) : first_(reinterpret_cast<uintptr_t>(memory)), next_(first_) {}
  template <class T>
  DMATTN_INLINE T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(next_);
    next_ += (static_cast<uintptr_t>(count) * sizeof(T) + 63) / 64 * 64;
    return piece;
  }
  DMATTN_INLINE size_t used() const { return next_ - first_; }

 private:
  uintptr_t first_, next_;
};

// A row-major matrix with whole vectors in a row.
template <class R>
struct Matrix {
  R* data;
  int64_t stride;
  DMATTN_INLINE R* row(int64_t i) const { return data + i * stride; }
};

template <class R>
DMATTN_INLINE Matrix<R> take_matrix(Arena& arena, int64_t rows, int64_t columns) {
  const int64_t stride = row_stride_of<R>(columns);
  return {arena.take<R>(rows * stride), stride};
}

// For what is computed of each pair of a chunk: [keys, queries], or [rows, keys] with index lists.
template <class R>
DMATTN_INLINE Matrix<R> take_pairs(Arena& arena, const AttentionParams& p) {
  const bool has_lists = p.mask.index.entries.data;
  return take_matrix<R>(arena, has_lists ? kListHeads : kChunkKeys, has_lists ? kListChunkKeys : kMaxTileQueries);
}

}  // namespace
}  // namespace dmattn::cpu
