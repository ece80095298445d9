// Which query sees which key on CUDA: the one place that decides it, for all kernels.
//
// Lengths, causality, padding, start and end all become the same thing: the span of positions that see a key. Without an
// argument the span is wide; a key beyond the end has an empty span. Only a block mask adds bits to that.
#pragma once

#include <cstdint>

#include "../../params.h"

namespace dmattn::cuda {

inline constexpr int kFirstPosition = -(1 << 28), kLastPosition = 1 << 28;  // beyond every position

// The positions that see a key: first <= position < last.
struct Span {
  int first, last;
  __device__ __forceinline__ bool sees(int position) const { return first <= position && position < last; }
  // Does some position of [low, high] see the key? Does every one?
  __device__ __forceinline__ bool touches(int low, int high) const { return first <= high && low < last && first < last; }
  __device__ __forceinline__ bool covers(int low, int high) const { return first <= low && high < last; }
  static __device__ __forceinline__ Span empty() { return {0, 0}; }
  static __device__ __forceinline__ Span of(int2 span) { return {span.x, span.y}; }  // as lists of live keys hold it
};

// The first element of (batch, query head) in a PerHead tensor; null where the tensor is not given.
template <class T>
__device__ __forceinline__ T* row_of(const PerHead& tensor, int batch, int head) {
  if (!tensor.data) return nullptr;
  return static_cast<T*>(tensor.data) + batch * tensor.batch_stride +
         (head / static_cast<int>(tensor.head_divisor)) * tensor.head_stride;
}

// Spans of the keys of one head: its rows of start and end, the length, and causality.
struct SpanSource {
  const int32_t* start;  // [Sk] or null
  const int32_t* end;    // [Sk] or null
  int key_length;
  bool is_causal;

  __device__ __forceinline__ SpanSource(const MaskParams& mask, int length, int batch, int head)
      : start(row_of<const int32_t>(mask.start, batch, head)),
        end(row_of<const int32_t>(mask.end, batch, head)),
        key_length(length),
        is_causal(mask.is_causal) {}

  __device__ __forceinline__ SpanSource(const MaskParams& mask, int length, const int32_t* starts, const int32_t* ends)
      : start(starts), end(ends), key_length(length), is_causal(mask.is_causal) {}

  __device__ __forceinline__ bool has_intervals() const { return start || end; }
  __device__ __forceinline__ Span of_key(int key) const {
    if (key < 0 || key >= key_length) return Span::empty();
    return span_of(key, start ? start[key] : kFirstPosition, end ? end[key] : kLastPosition);
  }
  // The span of a key whose interval is [first, last).
  __device__ __forceinline__ Span span_of(int key, int first, int last) const {
    first = max(first, is_causal ? key : kFirstPosition);
    last = min(last, kLastPosition);
    return first < last ? Span{first, last} : Span::empty();
  }
};

// From a query to the position that `local` keys end at; any offset may be given.
__device__ __forceinline__ int local_shift(const IndexLists& index, int batch, int shift) {
  return index.offset ? min(max(index.offset[batch * index.offset_stride], kFirstPosition), kLastPosition) : shift;
}

// The tables of one head of a block mask. Whoever reads them takes an entry that makes no sense for an empty tile.
struct TileSource {
  const int32_t* tiles;    // [Nq, Nk] or null
  const int32_t* rows;     // [Nq, 1 + Nk]
  const int32_t* columns;  // [Nk, 1 + Nq]

  __device__ __forceinline__ TileSource(const MaskParams& mask, int batch, int head)
      : tiles(row_of<const int32_t>(mask.tiles, batch, head)),
        rows(row_of<const int32_t>(mask.rows, batch, head)),
        columns(row_of<const int32_t>(mask.columns, batch, head)) {}
};

// The bits of a partial tile, [tile_q, tile_k / 32], or null for a full tile; `state` is an entry of `tiles`.
__device__ __forceinline__ const uint32_t* bits_of_tile(const MaskParams& mask, int state) {
  const int64_t slot = static_cast<int64_t>(state) - kTilePartial;
  return state >= kTilePartial && slot < mask.slots ? mask.bits + slot * mask.tile_q * (mask.tile_k / 32) : nullptr;
}

__device__ __forceinline__ bool is_live_tile(const MaskParams& mask, int state) {
  return state == kTileFull || (state >= kTilePartial && static_cast<int64_t>(state) - kTilePartial < mask.slots);
}

}  // namespace dmattn::cuda
