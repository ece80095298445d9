// Adds up the parts that the blocks of decoding left.
#include "dependent_launch.cuh"
#include "kernel_limits.cuh"
#include "parts.cuh"

namespace dmattn::cuda {
namespace {

constexpr int kMergeWarps = 8, kMergeThreads = kMergeWarps * 32, kMergeColumns = 128;
constexpr int kAtOnce = 8;  // parts that a thread loads before it adds them up
constexpr int kMergeLevels = 4;
static_assert(kMergeWarps * kAtOnce << (kMergeLevels - 1) >= kMostParts);

// part_sums [B, heads, rows, parts], part_out [B, heads, rows, parts, Dv] -> out, lse. A block has one row and 128 columns of it;
// each of its warps has as many neighbouring parts, a power of two.
template <class T>
__global__ __launch_bounds__(kMergeThreads) void merge_parts_kernel(const __grid_constant__ DecodeCall call) {
  __shared__ float4 values[kMergeWarps][32];
  __shared__ float2 sums[kMergeWarps];
  const DecodeParams& p = call.p;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int64_t row_index = blockIdx.x;
  const int head_index = static_cast<int>(row_index / call.rows), row = static_cast<int>(row_index % call.rows);
  const int batch = head_index / call.heads, head = head_index % call.heads;
  const int value_dim = static_cast<int>(p.value_dim), column = static_cast<int>(blockIdx.y) * kMergeColumns + lane * 4;
  const float2* const part_sums = call.part_sums + row_index * call.parts;
  const float* const part_out = call.part_out + row_index * call.parts * value_dim + column;
  int run = 1;  // parts of a warp
  while (run * kMergeWarps < call.parts) run *= 2;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  const int block_keys = call.split_keys * call.block_splits;
  const int parts = (keys_of(p, batch) + block_keys - 1) / block_keys;  // that were written
  // Add up this warp's parts.
  Part waiting[kMergeLevels];
  const int times = (run + kAtOnce - 1) / kAtOnce;
  for (int time = 0; time < times; ++time) {
    Part some[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int in_run = time * kAtOnce + i, part = warp * run + in_run;
      some[i] = Part::nothing();
      if (in_run < run && part < parts && column < value_dim) {
        some[i].sums = part_sums[part];
        some[i].values = *reinterpret_cast<const float4*>(part_out + static_cast<int64_t>(part) * value_dim);
      }
    }
    add_part(waiting, time, time + 1 == times, merge_all(some));
  }
  // Add up what the warps have.
  values[warp][lane] = waiting[0].values;
  if (lane == 0) sums[warp] = waiting[0].sums;
  __syncthreads();
  if (warp > 0 || column >= value_dim) return;
  Part of_warps[kMergeWarps];
#pragma unroll
  for (int i = 0; i < kMergeWarps; ++i) of_warps[i] = {sums[i], values[i][lane]};
  finish_row<T>(p, batch, RowPlace(call, head, row), column, merge_all(of_warps));
}

}  // namespace

cudaError_t launch_merge_parts(const DecodeCall& call, cudaStream_t stream) {
  const DecodeParams& p = call.p;
  const dim3 grid(grid_of(p.batch * call.heads * call.rows),
                  static_cast<unsigned>((p.value_dim + kMergeColumns - 1) / kMergeColumns));
  const auto kernel = p.dtype == DType::kBFloat16 ? merge_parts_kernel<__nv_bfloat16> : merge_parts_kernel<__half>;
  return launch_dependent(kernel, grid, kMergeThreads, 0, stream, call);
}

}  // namespace dmattn::cuda
