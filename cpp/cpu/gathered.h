// Products of a few rows with rows that lie anywhere, in place: what a query alone has to do with its keys.
//
// Vectors run along the head dimension. Products of rows end with sums over lanes, those of several keys at once.
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

// In each group of kCount lanes: lane i becomes the sum of that group's lanes of v[i].
template <class R, int kCount, int kBit = 1>
DMATTN_INLINE Vec<R> sum_each(const Vec<R>* v) {
  if constexpr (kBit == kCount) {
    return v[0];
  } else {
    Vec<R> half[kCount / 2 / kBit];
    DMATTN_UNROLL
    for (int i = 0; i < kCount / 2 / kBit; ++i)
      half[i] = add_neighbours<kBit, R>(v[2 * i], v[2 * i + 1], typename CountLanes<kLanes<R>>::Type());
    return sum_each<R, kCount, 2 * kBit>(half);
  }
}

// to[i][k] = factor <a[i], b[k]> for kRows interleaved rows of a. The index of b, and the rows of `to`, go on to whole vectors.
//
// A vector of a has a piece of every row. It meets the same piece of b[k], repeated for each row, so sums are over the lanes of a
// piece only.
template <int kRows, class R>
void dot_rows(const R* a, const GatheredRows<const R>& b, int64_t count, int64_t width, R factor, const Matrix<R>& to) {
  constexpr int kPiece = kLanes<R> / kRows;                    // one vector has the sums of as many keys
  constexpr int kKeys = max_of(kPiece, min_of(8, kLanes<R>));  // at once, so that products need not wait for each other
  for (int64_t k = 0; k < count; k += kKeys) {
    const R* rows[kKeys];
    Vec<R> sum[kKeys] = {};
    DMATTN_UNROLL
    for (int j = 0; j < kKeys; ++j) rows[j] = b.row(k + j);
    for (int64_t d = 0; d < width; d += kPiece) {
      const Vec<R> a_part = load<R>(a + d * kRows);
      DMATTN_UNROLL
      for (int j = 0; j < kKeys; ++j) sum[j] += a_part * load_repeated<kRows, R>(rows[j] + d);
    }
    DMATTN_UNROLL
    for (int j = 0; j < kKeys; j += kPiece) {
      R lanes[kLanes<R>];
      store<R>(lanes, sum_each<R, kPiece>(sum + j) * factor);
      DMATTN_UNROLL
      for (int i = 0; i < kRows; ++i) __builtin_memcpy(to.row(i) + k + j, lanes + i * kPiece, kPiece * sizeof(R));
    }
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

// to: the same blocks as dot_rows takes them, that of row i from i * width on. Vector after vector has the next piece of each
// row.
template <class R>
DMATTN_INLINE void interleave(const Matrix<R>& rows, int64_t count, int64_t width, R* to) {
  for_each_row_block<R>(count, [&](int64_t first, auto block) {
    constexpr int kRows = decltype(block)::kRows, kPiece = kLanes<R> / kRows;
    for (int64_t d = 0; d < width; d += kPiece) {
      for (int i = 0; i < kRows; ++i, to += kPiece) __builtin_memcpy(to, rows.row(first + i) + d, kPiece * sizeof(R));
    }
  });
}

}  // namespace
}  // namespace dmattn::cpu
