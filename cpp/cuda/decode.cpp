// Decoding on CUDA: executes a plan. Nothing here waits for the device, so the op can be captured in a graph, and nothing depends
// on lengths or page numbers, so a graph serves all of them.
#include "decode.h"

#include "inputs.h"

namespace dmattn::cuda {

void align_caches(CheckedDecode& checked) {
  DecodeParams& p = checked.params;
  checked.query = with_aligned_rows(checked.query), p.query = view_of(checked.query);
  checked.key = with_aligned_rows(checked.key), p.key = view_of_cache(checked.key, p.page_table);
  checked.value = with_aligned_rows(checked.value), p.value = view_of_cache(checked.value, p.page_table);
}

DecodeCall call_of(const DecodeParams& p, const DecodePlan& plan, void* workspace) {
  DecodeCall call{p};
  call.scale = static_cast<float>(p.scale);
  call.heads = plan.heads, call.sharing = plan.sharing, call.queries_apart = plan.queries_apart;
  call.group = plan.group, call.rows = plan.rows;
  call.split_keys = plan.split_keys, call.block_splits = plan.block_splits;
  call.parts = plan.parts, call.is_cluster = plan.is_cluster;
  call.part_out = plan.workspace.part_out.in<float>(workspace);
  call.part_sums = plan.workspace.part_sums.in<float2>(workspace);
  return call;
}

void run_decode(CheckedDecode& checked, const Device& device, Clusters clusters) {
  const DecodeParams& p = checked.params;
  DecodePlan plan = plan_decode(p, target_of(device), clusters);
  if (plan.instance.kernel == Kernel::kNone) return;
  align_caches(checked);
  if (plan.is_cluster) {
    const cudaError_t status = sm80::decode(call_of(p, plan, nullptr), plan.instance, device.stream());
    if (status != cudaErrorInvalidClusterSize) return check_cuda(status, "decode kernel");
    plan = plan_decode(p, target_of(device), Clusters::kNever);
  }
  std::optional<Tensor> memory;
  if (plan.workspace.bytes > 0) memory = empty_on(checked.query, {plan.workspace.bytes}, ScalarType::Byte);
  const DecodeCall call = call_of(p, plan, memory ? memory->data_ptr() : nullptr);
  check_cuda(sm80::decode(call, plan.instance, device.stream()), "decode kernel");
  if (call.part_out) DMATTN_CUDA_CHECK(launch_merge_parts(call, device.stream()));
}

namespace {

std::tuple<Tensor, Tensor> decode_op(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<Tensor> lengths,
                                     std::optional<Tensor> page_table, std::optional<Tensor> key_bias,
                                     std::optional<Tensor> sinks, std::optional<Tensor> indices, bool is_causal, double scale,
                                     double softcap, int64_t index_block, int64_t index_local, int64_t index_sinks) {
  const Device device(query);
  CheckedDecode checked =
      check_decode(query, key, value, std::move(lengths), std::move(page_table), std::move(key_bias), std::move(sinks),
                   std::move(indices), is_causal, scale, softcap, {index_block, index_local, index_sinks});
  run_decode(checked, device);
  return {checked.out, checked.lse};
}

}  // namespace
}  // namespace dmattn::cuda

DMATTN_KERNELS(CUDA, m) { m.impl("decode", TORCH_BOX(&dmattn::cuda::decode_op)); }
