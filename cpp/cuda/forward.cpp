// Attention forward on CUDA: the host side. Nothing here waits for the device, so the op can be captured in a graph.
#include "attention_plan.h"

namespace dmattn::cuda {
namespace {

std::tuple<Tensor, Tensor> forward_op(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<Tensor> start,
                                      std::optional<Tensor> end, std::optional<Tensor> tiles, std::optional<Tensor> rows,
                                      std::optional<Tensor> columns, std::optional<Tensor> bits, std::optional<Tensor> key_bias,
                                      std::optional<Tensor> bias, std::optional<Tensor> dropout_seed, bool is_causal,
                                      double scale, double softcap, double dropout_p, bool /*deterministic: for backward*/) {
  const Device device(query);
  CheckedForward checked =
      check_forward(query, key, value, {start, end, tiles, rows, columns, bits, key_bias, bias, dropout_seed}, is_causal, scale,
                    softcap, dropout_p);
  AttentionParams& p = checked.inputs.params;
  check_cuda_support(p);
  check_family();
  if (p.batch * p.heads * p.query_length == 0) return {checked.out, checked.lse};
  align_inputs(checked.inputs);
  const OwnedPlan plan = make_plan(p, query, device.stream());
  check_launch(sm80::forward({p, plan.plan, static_cast<float>(p.scale * kLog2OfE)}, device.stream()), p);
  return {checked.out, checked.lse};
}

}  // namespace
}  // namespace dmattn::cuda

STABLE_TORCH_LIBRARY_IMPL(dmattn, CUDA, m) { m.impl("forward", TORCH_BOX(&dmattn::cuda::forward_op)); }
