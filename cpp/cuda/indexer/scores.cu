// Scores of an indexer: for a tile of queries and a tile of keys, one product for each index head, and the weighted sum of what
// is positive in it, which stays in registers. What becomes of a score is in score_rows.cuh.
//
// Many heads: a block of eight warps computes 64 queries by kKeys keys; a warp has 32 queries and a quarter of the keys. The keys
// stay in shared memory, the queries come head after head through two buffers. Few heads, as models of grouped queries have them:
// a warp keeps 16 queries of all heads in registers, and tile after tile of keys passes by.
#include "../common/kernel_limits.cuh"
#include "../common/visibility.cuh"
#include "../sm80/tile.cuh"
#include "score_rows.cuh"

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

// The keys of columns first_column .. + kKeys - 1.
template <int kWidth, int kKeys, int kThreads, bool kFindsCandidates>
__device__ __forceinline__ void copy_index_keys(const IndexCall& call, const IndexQueries& at, uint32_t tile, int first_column) {
  const IndexTopKParams& p = call.p;
  const char* const from = sm80::rows_of_head(p.key, at.batch, at.group);
  const RowCopy<kWidth, kThreads> copy(static_cast<int>(p.head_dim));
#pragma unroll 4
  for (int r = 0; r < kKeys; r += copy.kRows) {
    const int key = key_of_column<kFindsCandidates>(call, first_column + copy.row + r);
    const bool wanted = key < p.keys;
    copy.start(tile, r, from + (wanted ? key : 0) * p.key.row_stride * 2, wanted);
  }
}

// Not fmaxf, which would make 0 of NaN.
__device__ __forceinline__ float positive(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ const float* weights_of(const IndexTopKParams& p, const IndexQueries& at) {
  return static_cast<const float*>(p.weights.data) + at.batch * p.weights.batch_stride + at.group * p.weights.head_stride;
}

// query [B, G, Sq, Hi, Di], key [B, G, keys, Di], weights [B, G, Sq, Hi] -> scores [rows of this part, row_stride], or
// candidates. A block of threads for a tile of keys (x) and a tile of queries (y).
template <class T, int kSteps, bool kFindsCandidates>
__global__ __launch_bounds__(kThreads) void index_scores_kernel(const __grid_constant__ IndexCall call) {
  using Shape = ScoreShape<kSteps>;
  constexpr int kColumns = Shape::kColumns, kHalf = Shape::kHalf;
  extern __shared__ __align__(128) uint8_t shared[];
  const IndexTopKParams& p = call.p;
  const int tile = static_cast<int>(blockIdx.y), first_column = static_cast<int>(blockIdx.x) * Shape::kKeys;
  const IndexQueries at(call, tile);
  const int rows = min(kQueries, static_cast<int>(p.query_length) - at.first);
  const CompetingRows of_last = competing_rows(p, at.offset + at.first + rows - 1, at.length);
  if (least_key_from<kFindsCandidates>(call, first_column) >= max(of_last.end, of_last.later_end)) return;

  const uint32_t keys = shared_address(shared), queries = keys + Shape::kKeyBytes;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = threadIdx.x % 32;
  const int warp_row = warp / 4 * 32, warp_key = warp % 4 * (8 * kColumns);
  copy_index_keys<Shape::kWidth, Shape::kKeys, kThreads, kFindsCandidates>(call, at, keys, first_column);
  copy_index_queries<T, kSteps>(call, at, queries, 0);
  copy_async_commit();

  Scores<kColumns> scores;
  sm80::clear(scores);
  const float scale = static_cast<float>(p.scale);
  const float* const weights = weights_of(p, at);
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
        scores[m][first + n][e] = fmaf(weight[m][e / 2], positive(products[m][n][e] * scale), scores[m][first + n][e]);
      }
    }
    __syncthreads();
  }
  copy_async_wait<0>();

  const ScoreGroup group(p, at);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int m = i / 2, r = i % 2;
    const ScoreRow<kFindsCandidates> row(call, at, tile, warp_row + 16 * m + 8 * r + lane / 4, rows);
    float of_row[kColumns][2];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) of_row[n][0] = scores[m][n][2 * r], of_row[n][1] = scores[m][n][2 * r + 1];
    finish_row(call, group, row, of_row, first_column + warp_key);
    if constexpr (kFindsCandidates) {
      add_candidates(call, row, of_row, first_column + warp_key);
    } else if (row.is_real) {
      store_scores(call, of_row, call.scores + row.number * call.row_stride, first_column + warp_key);
    }
  }
}

// Few heads of kSteps times 16 dimensions: a block of four warps.
template <bool kFindsCandidates>
struct FewHeads {
  static constexpr int kHeads = 4, kThreads = 128, kKeys = 64, kColumns = kKeys / 8, kKeyBytes = kKeys * 64 * 2;
  static constexpr int kBytes = 2 * kKeyBytes + (kFindsCandidates ? kThreads / 32 * StagedCandidates::kBytes : 0);
};

// The 16 queries of a warp, of all heads, as operands of mma; zero where there is no query, head or dimension. Where the scale is
// negative, so are they, for the sum takes what is positive in a product times the scale.
template <class T, int kSteps, int kHeads>
__device__ __forceinline__ void load_few_queries(const IndexCall& call, const IndexQueries& at, int warp_row, int rows,
                                                 uint32_t (&a)[kHeads][kSteps][4], float (&weight)[kHeads][2]) {
  const IndexTopKParams& p = call.p;
  const int lane = threadIdx.x % 32;
  const char* const from = sm80::rows_of_head(p.query, at.batch, at.group);
  const float* const weights = weights_of(p, at);
  const float size = fabsf(static_cast<float>(p.scale));
  const uint32_t sign = p.scale < 0.0 ? 0x80008000u : 0u;
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = warp_row + 8 * r + lane / 4;
      const bool is_real = row < rows && head < p.heads;
      weight[head][r] = is_real ? weights[(at.first + row) * p.weights.row_stride + head] * size : 0.0f;
      const char* const of_row = from + ((at.first + row) * p.query.row_stride + head * p.query_head_stride) * 2;
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        const int dim = 8 * i + lane % 4 * 2;
        const uint32_t pair = is_real && dim < p.head_dim ? *reinterpret_cast<const uint32_t*>(of_row + dim * 2) ^ sign : 0;
        a[head][i / 2][i % 2 * 2 + r] = pair;
      }
    }
  }
}

// The weighted sums of 16 queries and a tile of keys. Heads that there are not count for nothing, also where a key is infinite.
template <class T, int kSteps, int kHeads, int kColumns>
__device__ __forceinline__ void sum_few_heads(const uint32_t (&a)[kHeads][kSteps][4], const float (&weight)[kHeads][2], int heads,
                                              uint32_t keys, float (&sums)[kColumns][4]) {
  const Fragment<64> b = Fragment<64>::wide(keys, 0, 0);
#pragma unroll
  for (int n = 0; n < kColumns; n += 2) {
    uint32_t of_keys[kSteps][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) load_matrix(of_keys[k], b.step(8 * n, 2 * k));
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      if (head >= heads) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float products[4];
        Element<T>::product(products, a[head][0], of_keys[0][2 * half], of_keys[0][2 * half + 1]);
#pragma unroll
        for (int k = 1; k < kSteps; ++k) Element<T>::mma(products, a[head][k], of_keys[k][2 * half], of_keys[k][2 * half + 1]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float part = positive(products[e]);
          sums[n + half][e] = head == 0 ? weight[0][e / 2] * part : fmaf(weight[head][e / 2], part, sums[n + half][e]);
        }
      }
    }
  }
}

// As index_scores_kernel. Blocks of threads share the tiles of keys (x) of a tile of queries (y); each warp has 16 queries.
template <class T, int kSteps, bool kFindsCandidates>
__global__ __launch_bounds__(FewHeads<kFindsCandidates>::kThreads,
                             kSteps <= 2 ? 4 : 2) void index_few_heads_kernel(const __grid_constant__ IndexCall call) {
  using Shape = FewHeads<kFindsCandidates>;
  constexpr int kColumns = Shape::kColumns, kKeys = Shape::kKeys;
  extern __shared__ __align__(128) uint8_t shared[];
  const IndexTopKParams& p = call.p;
  const int tile = static_cast<int>(gridDim.y - 1 - blockIdx.y);  // the longest first
  const IndexQueries at(call, tile);
  const int rows = min(kQueries, static_cast<int>(p.query_length) - at.first);
  const CompetingRows of_last = competing_rows(p, at.offset + at.first + rows - 1, at.length);
  const int end = max(of_last.end, of_last.later_end), step = static_cast<int>(gridDim.x) * kKeys;
  int first_column = static_cast<int>(blockIdx.x) * kKeys;
  if (least_key_from<kFindsCandidates>(call, first_column) >= end) return;

  const uint32_t keys = shared_address(shared);
  const int warp = static_cast<int>(threadIdx.x / 32), warp_row = warp * 16;
  copy_index_keys<64, kKeys, Shape::kThreads, kFindsCandidates>(call, at, keys, first_column);
  copy_async_commit();
  uint32_t a[Shape::kHeads][kSteps][4];
  float weight[Shape::kHeads][2];
  load_few_queries<T>(call, at, warp_row, rows, a, weight);
  const int heads = static_cast<int>(p.heads);
  const ScoreGroup group(p, at);
  const int lane_row = warp_row + static_cast<int>(threadIdx.x) % 32 / 4;
  const ScoreRow<kFindsCandidates> rows_of_lane[2] = {{call, at, tile, lane_row, rows}, {call, at, tile, lane_row + 8, rows}};
  StagedCandidates candidates(reinterpret_cast<IndexEntry*>(shared + 2 * Shape::kKeyBytes) + warp_row * StagedCandidates::kRoom,
                              static_cast<int64_t>(tile) * kIndexTileQueries + warp_row);

  for (uint32_t buffer = 0; least_key_from<kFindsCandidates>(call, first_column) < end; first_column += step, buffer ^= 1) {
    const int next = first_column + step;
    if (least_key_from<kFindsCandidates>(call, next) < end) {
      copy_index_keys<64, kKeys, Shape::kThreads, kFindsCandidates>(call, at, keys + (buffer ^ 1) * Shape::kKeyBytes, next);
    }
    copy_async_commit();
    copy_async_wait<1>();
    __syncthreads();
    float sums[kColumns][4];
    if (warp_row < rows) sum_few_heads<T>(a, weight, heads, keys + buffer * Shape::kKeyBytes, sums);
    __syncthreads();
    if (warp_row >= rows) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float of_row[kColumns][2];
#pragma unroll
      for (int n = 0; n < kColumns; ++n) of_row[n][0] = sums[n][2 * r], of_row[n][1] = sums[n][2 * r + 1];
      const ScoreRow<kFindsCandidates>& row = rows_of_lane[r];
      finish_row(call, group, row, of_row, first_column);
      if constexpr (kFindsCandidates) {
        candidates.add(call, row.bound, r, of_row, first_column);
      } else if (row.is_real) {
        store_scores(call, of_row, call.scores + row.number * call.row_stride, first_column);
      }
    }
  }
  copy_async_wait<0>();
  if constexpr (kFindsCandidates) candidates.flush(call);
}

// The columns of a row: all keys, or those of a sample.
template <bool kFindsCandidates>
int64_t columns_of(const IndexCall& call) {
  if (kFindsCandidates || call.sample.log2 == 0) return call.p.keys;
  const int64_t blocks = scores_of_row(call.p, call.log2_score_block);
  return ((blocks + (int64_t{1} << call.sample.log2) - 1) >> call.sample.log2) << call.log2_score_block;
}

template <class T, int kSteps, bool kFindsCandidates>
cudaError_t launch_scores(const IndexCall& call, cudaStream_t stream) {
  using Shape = ScoreShape<kSteps>;
  static KernelAttribute known;
  const cudaError_t status = allow_shared_bytes(known, index_scores_kernel<T, kSteps, kFindsCandidates>, Shape::kBytes);
  if (status != cudaSuccess) return status;
  const dim3 grid(grid_of((columns_of<kFindsCandidates>(call) + Shape::kKeys - 1) / Shape::kKeys),
                  static_cast<unsigned>(call.tiles));
  index_scores_kernel<T, kSteps, kFindsCandidates><<<grid, kThreads, Shape::kBytes, stream>>>(call);
  return cudaGetLastError();
}

template <class T, int kSteps, bool kFindsCandidates>
cudaError_t launch_few_heads(const IndexCall& call, cudaStream_t stream) {
  using Shape = FewHeads<kFindsCandidates>;
  constexpr int64_t kEnoughBlocks = 4096;
  static KernelAttribute known;
  const cudaError_t status = allow_shared_bytes(known, index_few_heads_kernel<T, kSteps, kFindsCandidates>, Shape::kBytes);
  if (status != cudaSuccess) return status;
  const int64_t most = (columns_of<kFindsCandidates>(call) + Shape::kKeys - 1) / Shape::kKeys;
  const dim3 grid(grid_of(std::min(most, (kEnoughBlocks + call.tiles - 1) / call.tiles)), static_cast<unsigned>(call.tiles));
  index_few_heads_kernel<T, kSteps, kFindsCandidates><<<grid, Shape::kThreads, Shape::kBytes, stream>>>(call);
  return cudaGetLastError();
}

template <class T, bool kFindsCandidates>
cudaError_t launch_scores_of(const IndexCall& call, cudaStream_t stream) {
  const bool has_few_heads = call.p.heads <= FewHeads<kFindsCandidates>::kHeads;
  if (call.p.head_dim <= 32) {
    return has_few_heads ? launch_few_heads<T, 2, kFindsCandidates>(call, stream)
                         : launch_scores<T, 2, kFindsCandidates>(call, stream);
  }
  if (call.p.head_dim <= 64) {
    return has_few_heads ? launch_few_heads<T, 4, kFindsCandidates>(call, stream)
                         : launch_scores<T, 4, kFindsCandidates>(call, stream);
  }
  if (call.p.head_dim <= 128) return launch_scores<T, 8, kFindsCandidates>(call, stream);
  return launch_scores<T, 16, kFindsCandidates>(call, stream);
}

}  // namespace

cudaError_t launch_index_scores(const IndexCall& call, cudaStream_t stream) {
  if (call.p.dtype == DType::kBFloat16) return launch_scores_of<__nv_bfloat16, false>(call, stream);
  return launch_scores_of<__half, false>(call, stream);
}

cudaError_t launch_index_candidates(const IndexCall& call, cudaStream_t stream) {
  if (call.p.dtype == DType::kBFloat16) return launch_scores_of<__nv_bfloat16, true>(call, stream);
  return launch_scores_of<__half, true>(call, stream);
}

}  // namespace dmattn::cuda
