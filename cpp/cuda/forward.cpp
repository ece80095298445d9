// Attention forward on CUDA: executes a plan. Nothing here waits for the device, so the op can be captured in a graph.
#include "../forward_arguments.h"
#include "calls.h"
#include "find_keys.h"
#include "inputs.h"
#include "target.h"

namespace dmattn::cuda {
namespace {

cudaError_t launch(const ForwardCall& call, const ForwardPlan& plan, cudaStream_t stream) {
  if constexpr (kHasSm90) {
    if (plan.family == Family::kSm90) return sm90::forward(call, plan, stream);
  }
  return sm80::forward(call, plan.instance, stream);
}

CheckedForward forward_op(AttentionArguments given, bool wants_rest) {
  const Device device(given.query);
  CheckedForward checked = check_forward(std::move(given), wants_rest);
  align_inputs(checked.inputs);
  const AttentionParams& p = checked.inputs.params;
  const ForwardPlan plan = plan_forward(p, target_of(device));
  if (plan.family == Family::kNone) return checked;

  const OwnedWorkspace memory(checked.inputs.given.query, plan.workspace.bytes);
  ForwardCall call;
  call.p = p;
  call.scale = static_cast<float>(p.scale), call.scale_2 = static_cast<float>(p.scale * kLog2OfE);
  call.over_scale = static_cast<float>(1.0 / p.scale);
  call.live_keys = find_keys(p, plan.lists, plan.workspace.lists.in<int32_t>(memory.data()), device.stream());
  call.live_keys.is_direct = plan.keys == KeySource::kDirect;
  if (!call.live_keys.tile_counter) call.live_keys.tile_counter = plan.workspace.tile_counter.in<int32_t>(memory.data());
  if (plan.keys == KeySource::kCompact) {
    call.compact.key = plan.workspace.compact_key.in<void>(memory.data());
    call.compact.value = plan.workspace.compact_value.in<void>(memory.data());
    call.compact.key_bias = plan.workspace.compact_key_bias.in<float>(memory.data());
    call.compact.capacity = plan.compact_capacity;
    DMATTN_CUDA_CHECK(launch_compact_keys(call, device.stream()));
  }
  for_each_round(call, p, plan.unions, memory.data(), call.live_keys.tile_counter, device.stream(),
                 [&](const ForwardCall& round) { check_cuda(launch(round, plan, device.stream()), "attention kernel"); });
  return checked;
}

}  // namespace
}  // namespace dmattn::cuda

DMATTN_KERNELS(CUDA, m) {
  m.impl("forward", TORCH_BOX(&dmattn::unpack_forward<dmattn::cuda::forward_op>));
  m.impl("forward_plain", TORCH_BOX((&dmattn::unpack_forward_plain<dmattn::cuda::forward_op, dmattn::cuda::select_op>)));
}
