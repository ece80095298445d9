// Swizzled shared-memory tiles and the three warp products of attention over them.
//
// 16-byte chunk c of row r lies at chunk c ^ (r % 8), which keeps ldmatrix free of bank conflicts, and because c's bits and the
// swizzle's are disjoint from the row's, stepping along a row is one XOR with a constant.
#pragma once

#include "../calls.h"
#include "../common/device.cuh"

namespace dmattn::cuda::sm80 {

// The tiles of queries of a head that a launch has: all, or those whose unions are made.
DMATTN_HOST_DEVICE inline int64_t query_tiles_of(const AttentionParams& p, const LiveKeys& live_keys, int64_t queries) {
  return live_keys.unions.key ? live_keys.unions.tiles : (p.query_length + queries - 1) / queries;
}

// The query tile of a block. Blocks take head after head, so that the keys of a head stay in L2, and late tiles first, because
// causality makes them long. Under a block mask they follow the order that was made for it.
template <int kQueries>
struct QueryTile {
  int batch, head, kv_head, first_query;
  __device__ __forceinline__ QueryTile(const AttentionParams& p, const LiveKeys& live_keys, uint32_t index = block_index()) {
    const uint32_t tiles = static_cast<uint32_t>(query_tiles_of(p, live_keys, kQueries));
    if (kQueries == kQueryPadding && live_keys.order) index = static_cast<uint32_t>(live_keys.order[index]);
    const uint32_t heads = static_cast<uint32_t>(p.heads), group = heads / static_cast<uint32_t>(p.kv_heads);
    const uint32_t batch_head = index / tiles;
    batch = static_cast<int>(batch_head / heads), head = static_cast<int>(batch_head % heads);
    kv_head = head / static_cast<int>(group);
    first_query = static_cast<int>((static_cast<uint32_t>(live_keys.unions.first_tile) + tiles - 1 - index % tiles) * kQueries);
  }
};

// Where the rows of a head begin in a tensor of 16-bit elements.
__device__ __forceinline__ char* rows_of_head(const TensorView& tensor, int batch, int head) {
  return static_cast<char*>(tensor.data) + (batch * tensor.batch_stride + head * tensor.head_stride) * 2;
}

// A row-major tile of 16-bit elements, kWidth per row, at a 128-byte aligned shared address.
template <int kWidth>
struct Tile {
  static_assert(kWidth % 64 == 0);
  static constexpr int kRowBytes = kWidth * 2, kChunks = kWidth / 8;
  static __device__ __forceinline__ uint32_t offset(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row & 7)) << 4); }
};

// A thread's share of copying rows from global memory into a tile: 16 bytes of every kRows-th row.
template <int kWidth, int kThreads>
struct RowCopy {
  static constexpr int kChunks = kWidth / 8, kRows = kThreads / kChunks;
  int row, part;
  bool in_row;  // is this thread's part inside the row's `width` elements?

  // From a fresh thread index, so that nothing of this is kept in registers between copies.
  __device__ __forceinline__ explicit RowCopy(int width) : RowCopy(width, static_cast<int>(thread_index())) {}
  __device__ __forceinline__ RowCopy(int width, int thread)
      : row(thread / kChunks), part(thread % kChunks), in_row(part * 8 < width) {}
  // This thread's 16 bytes of row `row + r` of a tile, r a multiple of kRows.
  __device__ __forceinline__ uint32_t offset(int r) const {
    static_assert((kRows & (kRows - 1)) == 0);
    return (Tile<kWidth>::offset(row, part) ^ ((r & 7) << 4)) + r * Tile<kWidth>::kRowBytes;
  }
  // Copies to row `row + r` of the tile from the global row at `from`, which is not read unless wanted.
  __device__ __forceinline__ void start(uint32_t tile, int r, const char* from, bool wanted) const {
    start_at(tile + offset(r), from, wanted);
  }
  // The same for any row of the tile.
  __device__ __forceinline__ void start_row(uint32_t tile, int any_row, const char* from, bool wanted) const {
    start_at(tile + Tile<kWidth>::offset(any_row, part), from, wanted);
  }

 private:
  __device__ __forceinline__ void start_at(uint32_t to, const char* from, bool wanted) const {
    copy_async_16(to, in_row ? from + part * 16 : from, wanted && in_row);
  }
};

// Where a lane's ldmatrix row begins, for fragments whose first row is a multiple of 16 and whose first chunk is `chunk`.
template <int kWidth>
struct Fragment {
  uint32_t base;
  // 16 rows by 2 chunks: lanes 0-15 the rows of the first chunk. An A operand; a B operand when loaded transposed.
  static __device__ __forceinline__ Fragment tall(uint32_t tile, int row, int chunk, int lane = threadIdx.x % 32) {
    return at(tile, row + lane % 16, lane / 16, chunk);
  }
  // 16 rows by 2 chunks: lanes 0-15 both chunks of the first 8 rows. A B operand; an A operand when loaded transposed.
  static __device__ __forceinline__ Fragment wide(uint32_t tile, int row, int chunk, int lane = threadIdx.x % 32) {
    return at(tile, row + lane % 8 + lane / 16 * 8, lane / 8 % 2, chunk);
  }
  // So many rows and so many chunks, an even number, further on.
  __device__ __forceinline__ uint32_t step(int rows, int chunks) const {
    return (base ^ ((chunks & 7) << 4)) + (chunks >> 3) * 128 + rows * (kWidth * 2);
  }

 private:
  static __device__ __forceinline__ Fragment at(uint32_t tile, int row, int odd, int chunk) {
    return {tile + row * (kWidth * 2) + (((odd ^ chunk ^ row) & 7) << 4) + (chunk >> 3) * 128};
  }
};

// Products are a sequence of steps, each two columns of mma wide. A step's b fragment is loaded while the step before it
// computes, because with two warps for each scheduler nothing else hides the latency of ldmatrix.

struct Nothing {
  __device__ __forceinline__ void operator()(int, int) const {}
};

// d[16 kM, 8 kN] += a[16 kM, 16 kSteps] * b[8 kN, 16 kSteps]^T, both stored row by row. `beside(i, total)` does other work at
// each of `total` steps.
template <class T, int kSteps, int kM, int kN, int kWidthA, int kWidthB, class Beside = Nothing>
__device__ __forceinline__ void multiply_by_rows(float (&d)[kM][kN][4], Fragment<kWidthA> a, Fragment<kWidthB> b,
                                                 Beside beside = {}) {
  constexpr int kPairs = kN / 2, kTotal = kSteps * kPairs;
  uint32_t fa[2][kM][4], fb[2][4];
#pragma unroll
  for (int m = 0; m < kM; ++m) load_matrix(fa[0][m], a.step(16 * m, 0));
  load_matrix(fb[0], b.step(0, 0));
#pragma unroll
  for (int i = 0; i < kTotal; ++i) {
    const int k = i / kPairs, n = i % kPairs * 2, next = i + 1, at = i % 2;
    if (next < kTotal) load_matrix(fb[next % 2], b.step(next % kPairs * 16, next / kPairs * 2));
    if (n == 0 && k + 1 < kSteps) {
#pragma unroll
      for (int m = 0; m < kM; ++m) load_matrix(fa[(k + 1) & 1][m], a.step(16 * m, 2 * (k + 1)));
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      Element<T>::mma(d[m][n], fa[k & 1][m], fb[at][0], fb[at][1]);
      Element<T>::mma(d[m][n + 1], fa[k & 1][m], fb[at][2], fb[at][3]);
    }
    beside(i, kTotal);
  }
}

// d[16, 8 kN] += a * b[8 kN, 16 kSteps]^T, a's fragments in registers, b stored row by row.
template <class T, int kSteps, int kN, int kWidthB>
__device__ __forceinline__ void multiply_held(float (&d)[kN][4], const uint32_t (&a)[kSteps][4], Fragment<kWidthB> b) {
  constexpr int kPairs = kN / 2, kTotal = kSteps * kPairs;
  uint32_t fb[2][4];
  load_matrix(fb[0], b.step(0, 0));
#pragma unroll
  for (int i = 0; i < kTotal; ++i) {
    const int k = i / kPairs, n = i % kPairs * 2, next = i + 1, at = i % 2;
    if (next < kTotal) load_matrix(fb[next % 2], b.step(next % kPairs * 16, next / kPairs * 2));
    Element<T>::mma(d[n], a[k], fb[at][0], fb[at][1]);
    Element<T>::mma(d[n + 1], a[k], fb[at][2], fb[at][3]);
  }
}

// d[16 kM, 8 kN] += a * b[16 kSteps, 8 kN], b stored row by row, a's fragments from `get_a(k, m, uint32_t[4])`.
template <class T, int kSteps, int kM, int kN, int kWidthB, class GetA, class Beside = Nothing>
__device__ __forceinline__ void multiply_by_columns(float (&d)[kM][kN][4], GetA get_a, Fragment<kWidthB> b, Beside beside = {}) {
  constexpr int kPairs = kN / 2, kTotal = kSteps * kPairs;
  uint32_t fa[2][kM][4], fb[2][4];
#pragma unroll
  for (int m = 0; m < kM; ++m) get_a(0, m, fa[0][m]);
  load_matrix_transposed(fb[0], b.step(0, 0));
#pragma unroll
  for (int i = 0; i < kTotal; ++i) {
    const int k = i / kPairs, n = i % kPairs * 2, next = i + 1, at = i % 2;
    if (next < kTotal) load_matrix_transposed(fb[next % 2], b.step(next / kPairs * 16, next % kPairs * 2));
    if (n == 0 && k + 1 < kSteps) {
#pragma unroll
      for (int m = 0; m < kM; ++m) get_a(k + 1, m, fa[(k + 1) & 1][m]);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      Element<T>::mma(d[m][n], fa[k & 1][m], fb[at][0], fb[at][1]);
      Element<T>::mma(d[m][n + 1], fa[k & 1][m], fb[at][2], fb[at][3]);
    }
    beside(i, kTotal);
  }
}

// The accumulators of a product as the A operand of the next: columns 16 k to 16 k + 15.
template <class T, int kColumns>
__device__ __forceinline__ void as_operand(const float (&x)[kColumns][4], int k, uint32_t (&a)[4]) {
  a[0] = Element<T>::narrow_pair(x[2 * k][0], x[2 * k][1]);
  a[1] = Element<T>::narrow_pair(x[2 * k][2], x[2 * k][3]);
  a[2] = Element<T>::narrow_pair(x[2 * k + 1][0], x[2 * k + 1][1]);
  a[3] = Element<T>::narrow_pair(x[2 * k + 1][2], x[2 * k + 1][3]);
}

// Where a thread's pairs of accumulators go in a tile of 16-bit elements: column 8 n after `column`, which is a multiple of the
// number of columns. As in a fragment, a step along the row is one XOR.
template <int kWidth>
struct PairPlace {
  uint32_t base;
  __device__ __forceinline__ PairPlace(uint32_t tile, int row, int column)
      : base(tile + Tile<kWidth>::offset(row + threadIdx.x % 32 / 4, column / 8) + threadIdx.x % 4 * 4) {}
  __device__ __forceinline__ uint32_t at(int m, int r, int n) const {
    return (base ^ ((n & 7) << 4)) + (n >> 3) * 128 + (16 * m + 8 * r) * (kWidth * 2);
  }
};

// Accumulators, times `factor(m, r)`, into a tile of 16-bit elements.
template <class T, int kWidth, int kM, int kN, class Factor>
__device__ __forceinline__ void put_tile(uint32_t tile, const float (&x)[kM][kN][4], int row, int column, Factor factor) {
  static_assert((kN & (kN - 1)) == 0);
  const PairPlace<kWidth> place(tile, row, column);
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float f = factor(m, r);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        // A row that sees nothing has factor 0, and NaN from its neighbours' keys must not survive that.
        const float left = f == 0.0f ? 0.0f : x[m][n][2 * r] * f, right = f == 0.0f ? 0.0f : x[m][n][2 * r + 1] * f;
        store_shared_4(place.at(m, r, n), Element<T>::narrow_pair(left, right));
      }
    }
  }
}

// Starts the copies of the rows of a head of query or grad_out, from first_query on, into a tile of kQueries rows.
template <int kDim, int kThreads, int kQueries>
__device__ __forceinline__ void copy_tile(uint32_t tile, const TensorView& tensor, int64_t query_length, int batch, int head,
                                          int first_query, int width) {
  const char* const from = rows_of_head(tensor, batch, head);
  const RowCopy<kDim, kThreads> copy(width);
#pragma unroll 4
  for (int r = 0; r < kQueries; r += copy.kRows) {
    const int query = first_query + copy.row + r;
    const bool wanted = query < query_length;
    copy.start(tile, r, from + (wanted ? query : 0) * tensor.row_stride * 2, wanted);
  }
}

// Writes a tile's first `width` columns to the global rows that `row_at(r)` names; a row without a place is left out (null).
template <int kWidth, int kThreads, int kRows, class RowAt>
__device__ __forceinline__ void store_tile(const void* tile, int width, RowAt row_at) {
  constexpr int kChunks = kWidth / 8;
  const int part = threadIdx.x % kChunks;
#pragma unroll 4
  for (int r = threadIdx.x / kChunks; r < kRows; r += kThreads / kChunks) {
    char* const to = row_at(r);
    if (to && part * 8 < width) {
      *reinterpret_cast<uint4*>(to + part * 16) =
          *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(tile) + Tile<kWidth>::offset(r, part));
    }
  }
}

// Adds accumulators to rows of fp32 sums in global memory, of `width` floats, a multiple of 16. They are in the order of mma.sync
// (sum_place): what a lane holds of two neighbouring columns of mma lies together. rows[m][r] is the global row of tile row
// 16 m + 8 r + lane / 4. Columns beyond the width are zero and are added to the first ones, so that there is no branch. The adds
// are cut into `total` parts, because many of them in a row stall.
template <int kM, int kN>
__device__ __forceinline__ void add_rows(const float (&x)[kM][kN][4], float* const (&rows)[kM][2], int column, int width,
                                         int part, int total) {
  static_assert(kN % 2 == 0);
  constexpr int kAdds = kM * kN;
#pragma unroll
  for (int i = 0; i < kAdds; ++i) {
    if (i < part * kAdds / total || i >= (part + 1) * kAdds / total) continue;
    const int m = i / kN, r = i % kN / (kN / 2), n = i % (kN / 2) * 2;
    const int at = column + 8 * n < width ? column + 8 * n : 0;
    add_4(rows[m][r] + at + threadIdx.x % 4 * 4, x[m][n][2 * r], x[m][n][2 * r + 1], x[m][n + 1][2 * r], x[m][n + 1][2 * r + 1]);
  }
}

// The same as work that a product does beside its steps.
template <int kM, int kN>
struct AddRows {
  const float (&x)[kM][kN][4];
  float* const (&rows)[kM][2];
  int column, width;
  __device__ __forceinline__ void operator()(int part, int total) const { add_rows(x, rows, column, width, part, total); }
};

template <int kM, int kN>
__device__ __forceinline__ void clear(float (&x)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) x[m][n][0] = x[m][n][1] = x[m][n][2] = x[m][n][3] = 0.0f;
  }
}

}  // namespace dmattn::cuda::sm80
