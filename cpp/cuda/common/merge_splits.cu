// Adds up what the splits of decoding found, in order.
#include "dependent_launch.cuh"
#include "splits.cuh"

namespace dmattn::cuda {
namespace {

constexpr int kMergeWarps = 4, kMergeThreads = kMergeWarps * 32, kMergeColumns = 128, kAhead = 4;

// part_sums [B, Hkv, rows, splits], part_out [B, Hkv, rows, splits, Dv] -> out, lse. A block has one row and 128 columns of it;
// its warps take splits by turns.
template <class T>
__global__ __launch_bounds__(kMergeThreads) void merge_splits_kernel(const __grid_constant__ DecodeCall call) {
  __shared__ float weights[kMostSplits];
  __shared__ float of_warp[2][kMergeWarps];
  __shared__ float4 sums[kMergeWarps][32];
  const DecodeParams& p = call.p;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int64_t row_index = blockIdx.x;
  const int head_index = static_cast<int>(row_index / call.rows), row = static_cast<int>(row_index % call.rows);
  const int batch = head_index / static_cast<int>(p.kv_heads), kv_head = head_index % static_cast<int>(p.kv_heads);
  const int splits = (length_of(p, batch) + call.split_keys - 1) / call.split_keys;
  const int value_dim = static_cast<int>(p.value_dim), column = static_cast<int>(blockIdx.y) * kMergeColumns + lane * 4;
  const float2* const part_sums = call.part_sums + row_index * call.splits;
  const float* const part_out = call.part_out + row_index * call.splits * value_dim + column;
  wait_for_kernel_before();
  let_kernel_after_come();

  // Start loading the first values of this warp.
  const auto values_of = [&](int split) {
    const bool wanted = split < splits && column < value_dim;
    return wanted ? *reinterpret_cast<const float4*>(part_out + static_cast<int64_t>(split) * value_dim) : float4{};
  };
  float4 ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) ahead[i] = values_of(warp + i * kMergeWarps);

  // Find the largest maximum.
  constexpr int kEach = kMostSplits / kMergeThreads;
  float2 found[kEach];
  float maximum = negative_infinity();
  bool is_bad = false;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int split = thread + i * kMergeThreads;
    found[i] = split < splits ? part_sums[split] : float2{negative_infinity(), 0.0f};
    is_bad |= found[i].y < 0.0f;
    if (found[i].y != 0.0f) maximum = fmaxf(maximum, found[i].x);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, step));
  if (lane == 0) of_warp[0][warp] = maximum;
  is_bad = __syncthreads_or(is_bad);
#pragma unroll
  for (int i = 0; i < kMergeWarps; ++i) maximum = fmaxf(maximum, of_warp[0][i]);

  // Weigh each split, and add up the sums of weights.
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int split = thread + i * kMergeThreads;
    const float weight = found[i].y == 0.0f || is_bad ? 0.0f : rebase(found[i].x, maximum);
    if (split < splits) weights[split] = weight;
    sum += weight == 0.0f ? 0.0f : found[i].y * weight;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane == 0) of_warp[1][warp] = sum;
  __syncthreads();
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kMergeWarps; ++i) sum += of_warp[1][i];

  // Add up the values of this warp's splits, then those of all warps.
  float4 total{};
  const auto add = [&](float4 x, float weight) {
    if (weight == 0.0f) return;  // a value's NaN may have reached them
    total.x = fmaf(x.x, weight, total.x), total.y = fmaf(x.y, weight, total.y);
    total.z = fmaf(x.z, weight, total.z), total.w = fmaf(x.w, weight, total.w);
  };
  for (int first = warp; first < splits; first += kAhead * kMergeWarps) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int split = first + i * kMergeWarps;
      add(ahead[i], split < splits ? weights[split] : 0.0f);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) ahead[i] = values_of(first + (kAhead + i) * kMergeWarps);
  }
  sums[warp][lane] = total;
  __syncthreads();
  if (warp > 0) return;
#pragma unroll
  for (int i = 1; i < kMergeWarps; ++i) {
    const float4 x = sums[i][lane];
    total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
  }

  // Normalise and write.
  const RowPlace place(p, kv_head, row);
  if (column < value_dim) store_out<T>(p, batch, place, column, total, end_factor(maximum, sum, sink_of(p, place.head)));
  if (lane == 0 && blockIdx.y == 0) store_lse(p, batch, place, end_lse(maximum, sum));
}

}  // namespace

cudaError_t launch_merge_splits(const DecodeCall& call, cudaStream_t stream) {
  const DecodeParams& p = call.p;
  const dim3 grid(static_cast<unsigned>(p.batch * p.kv_heads * call.rows),
                  static_cast<unsigned>((p.value_dim + kMergeColumns - 1) / kMergeColumns));
  const auto kernel = p.dtype == DType::kBFloat16 ? merge_splits_kernel<__nv_bfloat16> : merge_splits_kernel<__half>;
  return launch_dependent(kernel, grid, kMergeThreads, 0, stream, call);
}

}  // namespace dmattn::cuda
