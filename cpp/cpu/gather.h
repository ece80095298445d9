// Copies rows of query, key or value into matrices of the type that arithmetic is done in.
#pragma once

#include "tile.h"

namespace dmattn::cpu {
namespace {

// to[k] = row keys[k]
template <class R>
void gather_rows(const TensorView& tensor, DType type, int64_t batch, int64_t head, const int32_t* keys, int64_t count,
                 int64_t width, const Matrix<R>& to) {
  const char* first = row_at(tensor, type, batch, head, 0);
  const int64_t whole = padded<R>(width), row_bytes = tensor.row_stride * element_size(type);
  with_stored(type, R(), [&](auto stored) {
    for (int64_t k = 0; k < count; ++k) widen_row<decltype(stored)>(first + keys[k] * row_bytes, to.row(k), width, whole);
  });
}

// to[i] = row first + i
template <class R>
void copy_rows(const TensorView& tensor, DType type, int64_t batch, int64_t head, int64_t first, int64_t count, int64_t width,
               const Matrix<R>& to) {
  const int64_t whole = padded<R>(width);
  with_stored(type, R(), [&](auto stored) {
    for (int64_t i = 0; i < count; ++i) {
      widen_row<decltype(stored)>(row_at(tensor, type, batch, head, first + i), to.row(i), width, whole);
    }
  });
}

// to[d][i] = from[i][d], and 0 for i in [count, whole vectors)
template <class R>
void transpose(const Matrix<R>& from, int64_t count, int64_t width, const Matrix<R>& to) {
  const int64_t whole = padded<R>(count);
  for (int64_t i = 0; i < whole; i += kLanes<R>) {
    for (int64_t d = 0; d < width; ++d) {
      R lanes[kLanes<R>];
      for (int64_t lane = 0; lane < kLanes<R>; ++lane) lanes[lane] = i + lane < count ? from.row(i + lane)[d] : R(0);
      store<R>(to.row(d) + i, load<R>(lanes));
    }
  }
}

}  // namespace
}  // namespace dmattn::cpu
