// Attention forward on CUDA: the host side. Nothing here waits for the device, so the op can be captured in a graph.
#include "attention_plan.h"

namespace dmattn::cuda {
namespace {

cudaError_t sm90_forward([[maybe_unused]] const ForwardCall& call, [[maybe_unused]] const Device& device) {
#ifdef DMATTN_WITH_SM90
  return sm90::forward(call, device_attribute<cudaDevAttrMultiProcessorCount>(device.index()), device.stream());
#else
  return cudaErrorNotSupported;
#endif
}

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
  const Family family = choose_family(device.index());
  if (p.batch * p.heads * p.query_length == 0) return {checked.out, checked.lse};
  align_inputs(checked.inputs);
  PlanNeeds needs;
  needs.order = family == Family::kSm80;
  const OwnedPlan plan = make_plan(p, query, device.stream(), needs);
  ForwardCall call{p, plan.plan, static_cast<float>(p.scale), static_cast<float>(p.scale * kLog2OfE),
                   static_cast<float>(1.0 / p.scale)};
  if (family != Family::kSm80 && p.key_length > 0) {  // without keys there is nothing to choose between
    std::optional<Tensor> ticket;
    if (!call.plan.ticket) {
      ticket = empty_on(query, {1}, ScalarType::Int);
      call.plan.ticket = static_cast<int32_t*>(ticket->data_ptr());
    }
    const cudaError_t status = sm90_forward(call, device);
    check(status != cudaErrorNotSupported || family == Family::kAuto,
          "DMATTN_FAMILY: sm90 has no kernel for this call: head sizes D=", p.head_dim, " and Dv=", p.value_dim,
          ", or strides that tensor copies do not take (use auto)");
    if (status != cudaErrorNotSupported) {
      check_cuda(status, "attention kernel");
      return {checked.out, checked.lse};
    }
    call.plan.ticket = nullptr;
  }
  check_launch(sm80::forward(call, device.stream()), p);
  return {checked.out, checked.lse};
}

}  // namespace
}  // namespace dmattn::cuda

STABLE_TORCH_LIBRARY_IMPL(dmattn, CUDA, m) { m.impl("forward", TORCH_BOX(&dmattn::cuda::forward_op)); }
