// The best keys of an indexer on CUDA: the host side. Nothing here waits for the device, so the op can be captured in a graph.
#include "../index_arguments.h"
#include "indexer/index_call.h"
#include "inputs.h"

namespace dmattn::cuda {
namespace {

std::tuple<Tensor, Tensor> index_top_k_op(const Tensor& query, const Tensor& key, const Tensor& weights,
                                          std::optional<Tensor> slope, std::optional<Tensor> start, std::optional<Tensor> end,
                                          std::optional<Tensor> query_offset, std::optional<Tensor> lengths, int64_t key_length,
                                          int64_t k, int64_t block_size, bool is_pooled, bool is_causal, int64_t local,
                                          int64_t sink, double scale, bool with_scores) {
  const Device device(query);
  CheckedIndexTopK checked =
      check_index_top_k(query, key, weights, std::move(slope), std::move(start), std::move(end), std::move(query_offset),
                        std::move(lengths), key_length, k, block_size, is_pooled, is_causal, local, sink, scale, with_scores);
  IndexCall call;
  call.p = checked.params;
  IndexTopKParams& p = call.p;
  check(p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16,
        "index_query: expected dtype bfloat16 or float16 on CUDA, got ", dtype_name(query.scalar_type()));
  if (p.top * p.batch * p.groups * p.query_length == 0) return {checked.indices, checked.scores};
  if (checked.query.stride(3) % 8 != 0) checked.query = torch::stable::clone(torch::stable::contiguous(checked.query));
  checked.query = with_aligned_rows(checked.query), checked.key = with_aligned_rows(checked.key);
  p.query = view_of(checked.query), p.query_head_stride = checked.query.stride(3), p.key = view_of(checked.key);

  const int log2_block = p.is_pooled ? 0 : p.log2_block;
  call.log2_score_block = std::min(log2_block, log2_keys_of_warp(p.heads, p.head_dim));
  call.log2_fold = log2_block - call.log2_score_block;
  const int64_t row_scores = scores_of_row(p, call.log2_score_block);
  // A block that several warps score has no score in one place, which a bound could be compared with.
  if (call.log2_fold == 0) call.sample = plan_sample(row_scores, p.top, p.heads * p.head_dim << call.log2_score_block);
  const bool is_sampled = call.sample.log2 > 0;
  const int64_t round = 4 << call.log2_fold;
  call.row_stride = ceil_div(ceil_div(row_scores, int64_t{1} << call.sample.log2), round) * round;
  call.tiles_per_group = ceil_div(p.query_length, kIndexTileQueries);
  call.processors = device_attribute<cudaDevAttrMultiProcessorCount>(device.index());
  const int64_t tiles = p.batch * p.groups * call.tiles_per_group;
  const int64_t row_bytes = call.row_stride * 4 + (is_sampled ? (call.sample.capacity + 1) * sizeof(IndexEntry) + 4 : 0);
  const int64_t tile_bytes = kIndexTileQueries * row_bytes;
  const int64_t at_once = std::clamp<int64_t>(kIndexWorkspaceBytes / tile_bytes, 1, std::min<int64_t>(tiles, 65535));
  const int64_t rows = at_once * kIndexTileQueries;
  const Tensor workspace = empty_on(query, {at_once * tile_bytes / 4}, ScalarType::Float);
  call.scores = static_cast<float*>(workspace.data_ptr());
  if (is_sampled) {
    call.candidates = reinterpret_cast<IndexEntry*>(call.scores + rows * call.row_stride);
    call.bounds = call.candidates + rows * call.sample.capacity;
    call.counts = reinterpret_cast<int32_t*>(call.bounds + rows);
  }
  for (; call.first_tile < tiles; call.first_tile += at_once) {
    call.tiles = std::min(at_once, tiles - call.first_tile);
    DMATTN_CUDA_CHECK(launch_index_scores(call, device.stream()));
    if (is_sampled) {
      DMATTN_CUDA_CHECK(launch_index_bounds(call, device.stream()));
      DMATTN_CUDA_CHECK(launch_index_candidates(call, device.stream()));
    }
    DMATTN_CUDA_CHECK(launch_index_choice(call, device.stream()));
  }
  return {checked.indices, checked.scores};
}

}  // namespace
}  // namespace dmattn::cuda

DMATTN_KERNELS(CUDA, m) { m.impl("index_top_k", TORCH_BOX(&dmattn::cuda::index_top_k_op)); }
