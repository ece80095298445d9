// Products of a few rows with rows that lie anywhere, in place: what a query alone has to do with its keys.
//
// Vectors run along the head dimension. A product of rows ends with sums over lanes, and as many of these as a vector has lanes
// are done at once.
#pragma once

#include "gemm.h"

namespace dmattn::cpu {
namespace {

// Row k is at data + index[k] * stride, in whole vectors.
template <class R>
struct GatheredRows {
  R* data;
  int64_t stride;
  const int32_t* index;
  DMATTN_INLINE R* row(int64_t k) const { return data + index[k] * stride; }
};

// A vector of lanes kIndex of a and b, whose lanes are numbered from kLanes on.
#if !defined(__clang__) && __GNUC__ < 12
#define DMATTN_SHUFFLE(R, a, b, ...) __builtin_shuffle(a, b, BitVec<R>{__VA_ARGS__})
#else
#define DMATTN_SHUFFLE(R, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#endif

template <int... kIndex>
struct Lanes {};
template <int kCount, int... kIndex>
struct CountLanes : CountLanes<kCount - 1, kCount - 1, kIndex...> {};
template <int... kIndex>
struct CountLanes<0, kIndex...> {
  using Type = Lanes<kIndex...>;
};

// In the lanes whose number has bit kBit: sums of neighbours, kBit lanes apart, of b; in the others those of a.
template <int kBit, class R, int... kLane>
DMATTN_INLINE Vec<R> add_neighbours(Vec<R> a, Vec<R> b, Lanes<kLane...>) {
  return DMATTN_SHUFFLE(R, a, b, (kLane & kBit ? kLane + kLanes<R> : kLane)...) +
         DMATTN_SHUFFLE(R, a, b, (kLane & kBit ? kLane - kBit + kLanes<R> : kLane + kBit)...);
}

// Lane i becomes the sum of the lanes of v[i].
template <class R, int kBit = 1>
DMATTN_INLINE Vec<R> sum_each(const Vec<R>* v) {
  if constexpr (kBit == kLanes<R>) {
    return v[0];
  } else {
    Vec<R> half[kLanes<R> / 2 / kBit];
    DMATTN_UNROLL
    for (int i = 0; i < kLanes<R> / 2 / kBit; ++i)
      half[i] = add_neighbours<kBit, R>(v[2 * i], v[2 * i + 1], typename CountLanes<kLanes<R>>::Type());
    return sum_each<R, 2 * kBit>(half);
  }
}

// to[i][k] = factor <a[i], b[k]> for kRows rows of a. The index of b, and the rows of `to`, go on to whole vectors.
template <int kRows, class R>
void dot_rows(const Matrix<R>& a, const GatheredRows<const R>& b, int64_t count, int64_t width, R factor, const Matrix<R>& to) {
  constexpr int kColumns = kLanes<R> / kRows;
  for (int64_t k = 0; k < count; k += kColumns) {
    const R* rows[kColumns];
    Vec<R> sum[kLanes<R>] = {};
    DMATTN_UNROLL
    for (int j = 0; j < kColumns; ++j) rows[j] = b.row(k + j);
    for (int64_t d = 0; d < width; d += kLanes<R>) {
      Vec<R> a_part[kRows];
      DMATTN_UNROLL
      for (int i = 0; i < kRows; ++i) a_part[i] = load<R>(a.row(i) + d);
      DMATTN_UNROLL
      for (int j = 0; j < kColumns; ++j) {
        const Vec<R> b_part = load<R>(rows[j] + d);
        DMATTN_UNROLL
        for (int i = 0; i < kRows; ++i) sum[i * kColumns + j] += a_part[i] * b_part;
      }
    }
    R lanes[kLanes<R>];
    store<R>(lanes, sum_each<R>(sum) * factor);
    DMATTN_UNROLL
    for (int i = 0; i < kRows; ++i) __builtin_memcpy(to.row(i) + k, lanes + i * kColumns, kColumns * sizeof(R));
  }
}

// How many vectors of each of kRows rows are summed in registers at once.
template <int kRows>
constexpr int kSumVectors = kRows * 4 <= kTileRows * kTileVectors ? 4 : kTileRows * kTileVectors / kRows;

template <int kRows, int kVectors, class R>
DMATTN_INLINE void add_rows_part(const Matrix<R>& a, const GatheredRows<const R>& b, int64_t count, int64_t column,
                                 const Matrix<R>& to) {
  Vec<R> sum[kRows][kVectors];
  DMATTN_UNROLL
  for (int i = 0; i < kRows; ++i) {
    DMATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) sum[i][v] = load<R>(to.row(i) + column + v * kLanes<R>);
  }
  for (int64_t k = 0; k < count; ++k) {
    const R* row = b.row(k) + column;
    Vec<R> part[kVectors];
    DMATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) part[v] = load<R>(row + v * kLanes<R>);
    DMATTN_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const Vec<R> x = splat<R>(a.row(i)[k]);
      DMATTN_UNROLL
      for (int v = 0; v < kVectors; ++v) sum[i][v] += x * part[v];
    }
  }
  DMATTN_UNROLL
  for (int i = 0; i < kRows; ++i) {
    DMATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) store<R>(to.row(i) + column + v * kLanes<R>, sum[i][v]);
  }
}

// to[i] += the sum over k of a[i][k] b[k], for kRows rows.
template <int kRows, class R>
void add_rows(const Matrix<R>& a, const GatheredRows<const R>& b, int64_t count, int64_t width, const Matrix<R>& to) {
  constexpr int kVectors = kSumVectors<kRows>;
  int64_t d = 0;
  for (; d + kVectors * kLanes<R> <= width; d += kVectors * kLanes<R>) add_rows_part<kRows, kVectors, R>(a, b, count, d, to);
  for (; d < width; d += kLanes<R>) add_rows_part<kRows, 1, R>(a, b, count, d, to);
}

template <int kRows, int kVectors, class R>
DMATTN_INLINE void scatter_rows_part(const Matrix<R>& a, const Matrix<R>& b, int64_t count, int64_t column, R factor,
                                     const GatheredRows<R>& to) {
  Vec<R> part[kRows][kVectors];
  DMATTN_UNROLL
  for (int i = 0; i < kRows; ++i) {
    DMATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) part[i][v] = load<R>(b.row(i) + column + v * kLanes<R>) * factor;
  }
  for (int64_t k = 0; k < count; ++k) {
    R* const row = to.row(k) + column;
    Vec<R> sum[kVectors];
    DMATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) sum[v] = load<R>(row + v * kLanes<R>);
    DMATTN_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const Vec<R> x = splat<R>(a.row(i)[k]);
      DMATTN_UNROLL
      for (int v = 0; v < kVectors; ++v) sum[v] += x * part[i][v];
    }
    DMATTN_UNROLL
    for (int v = 0; v < kVectors; ++v) store<R>(row + v * kLanes<R>, sum[v]);
  }
}

// to[k] += factor * the sum over kRows rows of a[i][k] b[i].
template <int kRows, class R>
void scatter_rows(const Matrix<R>& a, const Matrix<R>& b, int64_t count, int64_t width, R factor, const GatheredRows<R>& to) {
  constexpr int kVectors = kSumVectors<kRows>;
  int64_t d = 0;
  for (; d + kVectors * kLanes<R> <= width; d += kVectors * kLanes<R>)
    scatter_rows_part<kRows, kVectors, R>(a, b, count, d, factor, to);
  for (; d < width; d += kLanes<R>) scatter_rows_part<kRows, 1, R>(a, b, count, d, factor, to);
}

template <int kCount>
struct RowCount {
  static constexpr int kRows = kCount;
};

// Calls use(first, RowCount) for the blocks of rows that the functions above take.
template <class R, class Use>
DMATTN_INLINE void for_each_row_block(int64_t rows, const Use& use) {
  int64_t i = 0;
  if constexpr (kLanes<R> >= 4) {
    for (; i + 4 <= rows; i += 4) use(i, RowCount<4>());
  }
  for (; i + 2 <= rows; i += 2) use(i, RowCount<2>());
  if (i < rows) use(i, RowCount<1>());
}

template <class R>
DMATTN_INLINE Matrix<R> from_row(const Matrix<R>& m, int64_t i) {
  return {m.row(i), m.stride};
}

}  // namespace
}  // namespace dmattn::cpu
