// Scores of an indexer: for a tile of queries and a tile of keys, one product for each index head, and the weighted sum of what
// is positive in it, which stays in registers. What becomes of a score is in score_rows.cuh.
//
// A block of eight warps computes 64 queries by kKeys keys; a warp has 32 queries and a quarter of the keys. The keys stay in
// shared memory, the queries come head after head through two buffers. Few heads have a kernel of their own, in few_heads.cu.
#include "../common/kernel_limits.cuh"
#include "../common/visibility.cuh"
#include "score_inputs.cuh"
#include "score_rows.cuh"

namespace dmattn::cuda {
namespace {

using sm80::Fragment;
using sm80::RowCopy;

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
  static_assert(8 * kColumns == 1 << log2_keys_of_warp(kFewIndexHeads + 1, kSteps * 16));
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

// query [B, G, Sq, Hi, Di], key [B, G, keys, Di], weights [B, G, Sq, Hi] -> scores [rows of this part, row_stride], or
// candidates. A block of threads for a tile of keys (x) and a tile of queries (y).
template <class T, int kSteps, bool kFindsCandidates>
__global__ __launch_bounds__(kThreads) void index_scores_kernel(const __grid_constant__ IndexCall call) {
  using Shape = ScoreShape<kSteps>;
  constexpr int kColumns = Shape::kColumns, kHalf = Shape::kHalf;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
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
  for (int m = 0; m < 2; ++m) {
    const int row = warp_row + 16 * m + lane / 4, first = first_column + warp_key;
    const ScoreRow<kFindsCandidates> own[2] = {{call, at, tile, row, rows}, {call, at, tile, row + 8, rows}};
    float x[2][kColumns][2];
#pragma unroll
    for (int i = 0; i < 4 * kColumns; ++i) x[i / 2 % 2][i / 4][i % 2] = scores[m][i / 4][i % 4];
    const CommonKeys<kFindsCandidates> common_keys(call, group, own);
    finish_rows(call, group, own, x, first, common_keys.hold(call, first, 8 * kColumns));
    if constexpr (kFindsCandidates) {
      add_candidates(call, own, x, first);
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (own[r].is_real) store_scores(call, x[r], call.scores + own[r].number * call.row_stride, first);
      }
    }
  }
}

template <class T, int kSteps, bool kFindsCandidates>
cudaError_t launch_scores(const IndexCall& call, cudaStream_t stream) {
  using Shape = ScoreShape<kSteps>;
  static KernelAttribute known;
  const cudaError_t status = allow_shared_bytes(known, index_scores_kernel<T, kSteps, kFindsCandidates>, Shape::kBytes);
  if (status != cudaSuccess) return status;
  const dim3 grid(grid_of((columns_of<kFindsCandidates>(call) + Shape::kKeys - 1) / Shape::kKeys),
                  static_cast<unsigned>(call.tiles));
  return launch_scoring<kFindsCandidates>(index_scores_kernel<T, kSteps, kFindsCandidates>, grid, kThreads, Shape::kBytes, stream,
                                          call);
}

template <class T, bool kFindsCandidates>
cudaError_t launch_scores_of(const IndexCall& call, cudaStream_t stream) {
  if (call.p.head_dim <= 32) return launch_scores<T, 2, kFindsCandidates>(call, stream);
  if (call.p.head_dim <= 64) return launch_scores<T, 4, kFindsCandidates>(call, stream);
  if (call.p.head_dim <= 128) return launch_scores<T, 8, kFindsCandidates>(call, stream);
  return launch_scores<T, 16, kFindsCandidates>(call, stream);
}

template <bool kFindsCandidates>
cudaError_t launch_any_scores(const IndexCall& call, cudaStream_t stream) {
  if (has_few_heads(call.p.heads, call.p.head_dim)) return launch_few_heads(call, kFindsCandidates, stream);
  if (call.p.dtype == DType::kBFloat16) return launch_scores_of<__nv_bfloat16, kFindsCandidates>(call, stream);
  return launch_scores_of<__half, kFindsCandidates>(call, stream);
}

}  // namespace

cudaError_t launch_index_scores(const IndexCall& call, cudaStream_t stream) { return launch_any_scores<false>(call, stream); }

cudaError_t launch_index_candidates(const IndexCall& call, cudaStream_t stream) { return launch_any_scores<true>(call, stream); }

}  // namespace dmattn::cuda
