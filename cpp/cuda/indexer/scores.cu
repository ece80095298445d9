// Scores of an indexer: for a tile of queries and a tile of keys, one product for each index head, and the weighted sum of what
// is positive in it, which stays in registers.
//
// A block of eight warps computes 64 queries by kKeys keys; a warp has 32 queries and a quarter of the keys. The keys stay in
// shared memory, the queries come head after head through two buffers.
#include "../common/kernel_limits.cuh"
#include "../common/visibility.cuh"
#include "../sm80/tile.cuh"
#include "query_rows.cuh"

namespace dmattn::cuda {
namespace {

using sm80::Fragment;
using sm80::RowCopy;
using sm80::Tile;

constexpr int kThreads = 256, kQueries = kIndexTileQueries;

// kSteps: of 16 dimensions in a row.
template <int kSteps>
struct ScoreShape {
  static constexpr int kWidth = kSteps * 16 < 64 ? 64 : kSteps * 16;  // of a row in shared memory
  static constexpr int kKeys = kWidth > 128 ? 64 : 256;
  static constexpr int kColumns = kKeys / 4 / 8;             // columns of mma that a warp has
  static constexpr int kHalf = kColumns > 4 ? 4 : kColumns;  // of which so many are computed at once
  static constexpr int kKeyBytes = kKeys * kWidth * 2, kQueryBytes = kQueries * kWidth * 2;
  static constexpr int kBytes = kKeyBytes + 2 * kQueryBytes;
  static_assert(8 * kColumns == 1 << log2_keys_of_warp(kSteps * 16));
};

// What a warp's lane holds: rows 16 m + 8 r + lane / 4, columns 8 n + lane % 4 * 2 + {0, 1}.
template <int kColumns>
using Scores = float[2][kColumns][4];

template <class T, int kSteps>
__device__ __forceinline__ void copy_index_queries(const IndexCall& call, const IndexQueries& at, uint32_t tile, int head) {
  using Shape = ScoreShape<kSteps>;
  const IndexTopKParams& p = call.p;
  const char* const from = sm80::rows_of_head(p.query, at.batch, at.group) + head * p.query_head_stride * 2;
  const RowCopy<Shape::kWidth, kThreads> copy(static_cast<int>(p.head_dim));
#pragma unroll
  for (int r = 0; r < kQueries; r += copy.kRows) {
    const int query = at.first + copy.row + r;
    const bool wanted = query < p.query_length;
    copy.start(tile, r, from + (wanted ? query : 0) * p.query.row_stride * 2, wanted);
  }
}

template <class T, int kSteps>
__device__ __forceinline__ void copy_index_keys(const IndexCall& call, const IndexQueries& at, uint32_t tile, int first_key) {
  using Shape = ScoreShape<kSteps>;
  const IndexTopKParams& p = call.p;
  const char* const from = sm80::rows_of_head(p.key, at.batch, at.group);
  const RowCopy<Shape::kWidth, kThreads> copy(static_cast<int>(p.head_dim));
#pragma unroll 4
  for (int r = 0; r < Shape::kKeys; r += copy.kRows) {
    const int key = first_key + copy.row + r;
    const bool wanted = key < p.keys;
    copy.start(tile, r, from + (wanted ? key : 0) * p.key.row_stride * 2, wanted);
  }
}

// The largest of each `1 << log2_block` neighbouring columns, into the row of scores. Blocks lie in one warp.
template <int kColumns>
__device__ __forceinline__ void store_row(float (&row)[kColumns][2], float* to, int first_key, int keys, int log2_block) {
  const int lane = threadIdx.x % 32, column = lane % 4 * 2;
  if (log2_block == 0) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const int key = first_key + 8 * n + column;
      if (key + 1 < keys) {
        *reinterpret_cast<float2*>(to + key) = {row[n][0], row[n][1]};
      } else if (key < keys) {
        to[key] = row[n][0];
      }
    }
    return;
  }
  float best[kColumns];
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    best[n] = fmaxf(row[n][0], row[n][1]);
    if (log2_block > 1) best[n] = fmaxf(best[n], __shfl_xor_sync(0xffffffffu, best[n], 1));
    if (log2_block > 2) best[n] = fmaxf(best[n], __shfl_xor_sync(0xffffffffu, best[n], 2));
  }
  // Of blocks of more than 8 keys the first column's place gets the largest of all.
#pragma unroll
  for (int step = 1; step < kColumns; step *= 2) {
    if (log2_block < 4 || (8 << (log2_block - 4)) < 8 * step) continue;
#pragma unroll
    for (int n = 0; n + step < kColumns; n += 2 * step) best[n] = fmaxf(best[n], best[n + step]);
  }
  const int columns = log2_block > 3 ? 1 << (log2_block - 3) : 1;  // of 8 keys to a block
  const bool writes = log2_block == 1 || (log2_block == 2 ? lane % 2 : lane % 4) == 0;
#pragma unroll
  for (int n = 0; n < kColumns; ++n) {
    const int key = first_key + 8 * n + column;
    if (writes && n % columns == 0 && key < keys) to[key >> log2_block] = best[n];
  }
}

// query [B, G, Sq, Hi, Di], key [B, G, keys, Di], weights [B, G, Sq, Hi] -> scores [rows of this part, row_stride], where a key
// of the row competes. A block of threads for a tile of keys (x) and a tile of queries (y).
template <class T, int kSteps>
__global__ __launch_bounds__(kThreads) void index_scores_kernel(const __grid_constant__ IndexCall call) {
  using Shape = ScoreShape<kSteps>;
  constexpr int kColumns = Shape::kColumns, kHalf = Shape::kHalf;
  extern __shared__ __align__(128) uint8_t shared[];
  const IndexTopKParams& p = call.p;
  const IndexQueries at(call, static_cast<int>(blockIdx.y));
  const int first_key = static_cast<int>(blockIdx.x) * Shape::kKeys;
  const int rows = min(kQueries, static_cast<int>(p.query_length) - at.first);
  const int64_t first_position = at.offset + at.first;
  const CompetingRows of_last = competing_rows(p, first_position + rows - 1, at.length);
  if (first_key >= max(of_last.end, of_last.later_end)) return;

  const uint32_t keys = shared_address(shared), queries = keys + Shape::kKeyBytes;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int warp_row = warp / 4 * 32, warp_key = warp % 4 * (8 * kColumns);
  copy_index_keys<T, kSteps>(call, at, keys, first_key);
  copy_index_queries<T, kSteps>(call, at, queries, 0);
  copy_async_commit();

  Scores<kColumns> scores;
  sm80::clear(scores);
  const float scale = static_cast<float>(p.scale);
  const float* const weights =
      static_cast<const float*>(p.weights.data) + at.batch * p.weights.batch_stride + at.group * p.weights.head_stride;
  const int heads = static_cast<int>(p.heads);
  for (int head = 0; head < heads; ++head) {
    float weight[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = warp_row + 16 * (i / 2) + 8 * (i % 2) + lane / 4;
      weight[i / 2][i % 2] = row < rows ? weights[(at.first + row) * p.weights.row_stride + head] : 0.0f;
    }
    if (head + 1 < heads) {
      copy_index_queries<T, kSteps>(call, at, queries + (head + 1) % 2 * Shape::kQueryBytes, head + 1);
    }
    copy_async_commit();
    copy_async_wait<1>();
    __syncthreads();
    const Fragment<Shape::kWidth> a = Fragment<Shape::kWidth>::tall(queries + head % 2 * Shape::kQueryBytes, warp_row, 0);
#pragma unroll
    for (int first = 0; first < kColumns; first += kHalf) {
      const Fragment<Shape::kWidth> b = Fragment<Shape::kWidth>::wide(keys, warp_key + 8 * first, 0);
      float products[2][kHalf][4];
      sm80::clear(products);
      sm80::multiply_by_rows<T, kSteps, 2, kHalf>(products, a, b);
#pragma unroll
      for (int i = 0; i < 2 * kHalf * 4; ++i) {
        const int m = i / (kHalf * 4), n = i / 4 % kHalf, e = i % 4;
        // Not fmaxf, which would make 0 of NaN.
        const float product = products[m][n][e] * scale;
        scores[m][first + n][e] = fmaf(weight[m][e / 2], product < 0.0f ? 0.0f : product, scores[m][first + n][e]);
      }
    }
    __syncthreads();
  }
  copy_async_wait<0>();

  const float slope = p.slope ? static_cast<const float*>(p.slope)[at.group] : 0.0f;
  const int32_t* const start = row_of<const int32_t>(p.start, at.batch, at.group);
  const int32_t* const end = row_of<const int32_t>(p.end, at.batch, at.group);
  const int log2_width = p.is_pooled ? p.log2_block : 0;  // keys in a row of key
  const float middle = static_cast<float>((1 << log2_width) - 1) * 0.5f;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp_row + 16 * m + 8 * r + lane / 4;
      const int position = static_cast<int>(first_position) + row;
      const CompetingRows in = competing_rows(p, position, at.length);
      float finished[kColumns][2];
#pragma unroll
      for (int i = 0; i < 2 * kColumns; ++i) {
        const int key = first_key + warp_key + 8 * (i / 2) + lane % 4 * 2 + i % 2;
        bool is_in = (key >= in.first && key < in.end) || (key >= in.later && key < in.later_end);
        if (start) is_in = is_in && start[key] <= position;
        if (end) is_in = is_in && position < end[key];
        const float distance = static_cast<float>((key << log2_width) - position) + middle;
        const float score = fmaf(slope, distance, scores[m][i / 2][2 * r + i % 2]);
        finished[i / 2][i % 2] = is_in && score > negative_infinity() ? score : negative_infinity();
      }
      // All lanes of a row exchange their maxima, rows behind the last query too, but write nothing.
      float* const to = call.scores + (static_cast<int64_t>(blockIdx.y) * kQueries + row) * call.row_stride;
      store_row(finished, to, first_key + warp_key, row < rows ? static_cast<int>(p.keys) : 0, call.log2_score_block);
    }
  }
}

template <class T, int kSteps>
cudaError_t launch_scores(const IndexCall& call, cudaStream_t stream) {
  using Shape = ScoreShape<kSteps>;
  static KernelAttribute known;
  const cudaError_t status = allow_shared_bytes(known, index_scores_kernel<T, kSteps>, Shape::kBytes);
  if (status != cudaSuccess) return status;
  const dim3 grid(grid_of((call.p.keys + Shape::kKeys - 1) / Shape::kKeys), static_cast<unsigned>(call.tiles));
  index_scores_kernel<T, kSteps><<<grid, kThreads, Shape::kBytes, stream>>>(call);
  return cudaGetLastError();
}

template <class T>
cudaError_t launch_scores_of(const IndexCall& call, cudaStream_t stream) {
  if (call.p.head_dim <= 32) return launch_scores<T, 2>(call, stream);
  if (call.p.head_dim <= 64) return launch_scores<T, 4>(call, stream);
  if (call.p.head_dim <= 128) return launch_scores<T, 8>(call, stream);
  return launch_scores<T, 16>(call, stream);
}

}  // namespace

cudaError_t launch_index_scores(const IndexCall& call, cudaStream_t stream) {
  if (call.p.dtype == DType::kBFloat16) return launch_scores_of<__nv_bfloat16>(call, stream);
  return launch_scores_of<__half>(call, stream);
}

}  // namespace dmattn::cuda
