// Attention backward on the CPU: checks and allocation; the arithmetic is in kernels.cpp and what it includes.
#include "../backward_arguments.h"
#include "levels.h"
#include "phases.h"

namespace dmattn::cpu {
namespace {

constexpr int64_t kDeterministicWorkers = 8;  // sums are split the same way, whatever the number of threads

BackwardResults backward_op(BackwardArguments given) {
  CheckedBackward checked = check_backward(std::move(given));
  const BackwardParams& params = checked.params;
  check(!params.forward.mask.index.entries.data, "indices: index lists have no kernel on the CPU yet");
  if (params.forward.query_length == 0 ||
      params.forward.key_length == 0) {  // no pair of a query and a key: whatever gradients there are, are zero
    for (Tensor* grad : {&checked.grad_query, &checked.grad_key, &checked.grad_value}) torch::stable::zero_(*grad);
    return checked.results();
  }
  const auto batches = [](const Tensor& grad) { return grad.dim() > 1 ? grad.size(0) : 0; };
  const int64_t workers = params.deterministic ? kDeterministicWorkers : static_cast<int64_t>(torch::stable::get_num_threads());
  const BackwardCall call = {params, workers, batches(checked.grad_key_bias), batches(checked.grad_bias)};
  const Kernels& kernels = best_kernels();
  run_phases(kernels.backward_sizes(call),
             [&](int phase, int64_t task, void* scratch, void* shared) { kernels.backward(call, phase, task, scratch, shared); });
  return checked.results();
}

}  // namespace
}  // namespace dmattn::cpu

DMATTN_KERNELS(CPU, m) { m.impl("backward", TORCH_BOX(&dmattn::unpack_backward<dmattn::cpu::backward_op>)); }
