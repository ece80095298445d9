// The one matrix product that all of attention is made of: C = A B or C += A B, with sums in registers and elements of A
// broadcast.
//
// A may be row-major or column-major, the rows of C may be anywhere, and B is row-major with whole vectors in a row. So no
// product needs the keys of a tile transposed: they are only copied row by row.
#pragma once

#include "tile.h"

namespace dmattn::cpu {
namespace {

#ifdef __AVX512F__
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = 4;
#endif
constexpr int kTileVectors = 2;

// A[m][k], k contiguous.
template <class R>
struct RowMajor {
  const R* data;
  int64_t stride;
  DMATTN_INLINE const R* at(int64_t m) const { return data + m * stride; }
  DMATTN_INLINE int64_t index(int m, int64_t k) const { return m * stride + k; }
};

// A[m][k], m contiguous: a transposed matrix.
template <class R>
struct ColumnMajor {
  const R* data;
  int64_t stride;
  DMATTN_INLINE const R* at(int64_t m) const { return data + m; }
  DMATTN_INLINE int64_t index(int m, int64_t k) const { return k * stride + m; }
};

// C = factor A B, row m at data + m * stride.
template <class R>
struct Overwrite {
  R* data;
  int64_t stride;
  R factor;
  DMATTN_INLINE R* row(int64_t m) const { return data + m * stride; }
  DMATTN_INLINE Vec<R> update(const R*, Vec<R> sum) const { return sum * factor; }
};

// C += factor A B
template <class R>
struct Accumulate {
  R* data;
  int64_t stride;
  R factor;
  DMATTN_INLINE R* row(int64_t m) const { return data + m * stride; }
  DMATTN_INLINE Vec<R> update(const R* old, Vec<R> sum) const { return load<R>(old) + sum * factor; }
};

// C += factor A B, row m at data + index[m] * stride; no index comes twice.
template <class R>
struct AccumulateAt {
  R* data;
  int64_t stride;
  const int32_t* index;
  R factor;
  DMATTN_INLINE R* row(int64_t m) const { return data + index[m] * stride; }
  DMATTN_INLINE Vec<R> update(const R* old, Vec<R> sum) const { return load<R>(old) + sum * factor; }
};

template <int kRows, int kVectors, class R, template <class> class A, class C>
DMATTN_INLINE void multiply_tile(A<R> a, int64_t m, const R* b, int64_t b_stride, const C& c, int64_t column, int64_t depth) {
  Vec<R> sum[kRows][kVectors] = {};
  const R* a_tile = a.at(m);
  for (int64_t k = 0; k < depth; ++k) {
    Vec<R> b_row[kVectors];
    DMATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) b_row[v] = load<R>(b + k * b_stride + v * kLanes<R>);
    DMATTN_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const Vec<R> x = splat<R>(a_tile[a.index(i, k)]);
      DMATTN_UNROLL
      for (int v = 0; v < kVectors; ++v) sum[i][v] += x * b_row[v];
    }
  }
  DMATTN_UNROLL
  for (int i = 0; i < kRows; ++i) {
    R* row = c.row(m + i) + column;
    DMATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) store<R>(row + v * kLanes<R>, c.update(row + v * kLanes<R>, sum[i][v]));
  }
}

template <int kVectors, class R, template <class> class A, class C>
DMATTN_INLINE void multiply_columns(int64_t rows, int64_t depth, A<R> a, const R* b, int64_t b_stride, const C& c,
                                    int64_t column) {
  int64_t m = 0;
  for (; m + kTileRows <= rows; m += kTileRows) multiply_tile<kTileRows, kVectors>(a, m, b, b_stride, c, column, depth);
  if (kTileRows > 4 && m + 4 <= rows) {
    multiply_tile<4, kVectors>(a, m, b, b_stride, c, column, depth);
    m += 4;
  }
  if (m + 2 <= rows) {
    multiply_tile<2, kVectors>(a, m, b, b_stride, c, column, depth);
    m += 2;
  }
  if (m < rows) multiply_tile<1, kVectors>(a, m, b, b_stride, c, column, depth);
}

// C[rows][columns] (+)= A[rows][depth] B[depth][columns]; columns is whole vectors.
template <class R, template <class> class A, class C>
void multiply(int64_t rows, int64_t columns, int64_t depth, A<R> a, const R* b, int64_t b_stride, const C& c) {
  int64_t n = 0;
  for (; n + kTileVectors * kLanes<R> <= columns; n += kTileVectors * kLanes<R>) {
    multiply_columns<kTileVectors>(rows, depth, a, b + n, b_stride, c, n);
  }
  if (n < columns) multiply_columns<1>(rows, depth, a, b + n, b_stride, c, n);
}

// C = factor A B for row-major A, added up in pieces, because one long sum has larger rounding errors than eager PyTorch.
template <class R>
DMATTN_INLINE void multiply_in_pieces(int64_t rows, int64_t columns, int64_t depth, R factor, const Matrix<R>& a,
                                      const Matrix<R>& b, const Matrix<R>& c) {
  for (int64_t k = 0; k < depth; k += kPieceDepth) {
    const int64_t piece = min_of(kPieceDepth, depth - k);
    const RowMajor<R> left = {a.data + k, a.stride};
    if (k == 0) {
      multiply(rows, columns, piece, left, b.data, b.stride, Overwrite<R>{c.data, c.stride, factor});
    } else {
      multiply(rows, columns, piece, left, b.row(k), b.stride, Accumulate<R>{c.data, c.stride, factor});
    }
  }
}

}  // namespace
}  // namespace dmattn::cpu
