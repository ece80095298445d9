// Attention backward on the CPU: checks and allocation; the arithmetic is in kernels.cpp and what it includes.
#include "../arguments.h"
#include "levels.h"
#include "phases.h"

namespace dmattn::cpu {
namespace {

constexpr int64_t kDeterministicWorkers = 8;  // sums are split the same way, whatever the number of threads

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward_op(
    const Tensor& grad_out, std::optional<Tensor> grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& lse, std::optional<Tensor> start, std::optional<Tensor> end, std::optional<Tensor> tiles,
    std::optional<Tensor> rows, std::optional<Tensor> columns, std::optional<Tensor> bits, std::optional<Tensor> key_bias,
    std::optional<Tensor> bias, std::optional<Tensor> dropout_seed, bool is_causal, double scale, double softcap,
    double dropout_p, bool deterministic, bool need_key_bias, bool need_bias, std::optional<Tensor> lse_rest) {
  CheckedBackward checked =
      check_backward(grad_out, grad_lse,
                     check_attention(query, key, value, {start, end, tiles, rows, columns, bits, key_bias, bias, dropout_seed},
                                     is_causal, scale, softcap, dropout_p),
                     out, lse, lse_rest, deterministic, need_key_bias, need_bias);
  if (query.size(2) == 0 || key.size(2) == 0) {  // no pair of a query and a key: whatever gradients there are, are zero
    for (Tensor* grad : {&checked.grad_query, &checked.grad_key, &checked.grad_value}) torch::stable::zero_(*grad);
    return {checked.grad_query, checked.grad_key, checked.grad_value, checked.grad_key_bias, checked.grad_bias};
  }
  const auto batches = [](const Tensor& grad) { return grad.dim() > 1 ? grad.size(0) : 0; };
  const int64_t workers = deterministic ? kDeterministicWorkers : static_cast<int64_t>(torch::stable::get_num_threads());
  const BackwardCall call = {checked.params, workers, batches(checked.grad_key_bias), batches(checked.grad_bias)};
  const Kernels& kernels = best_kernels();
  run_phases(kernels.backward_sizes(call),
             [&](int phase, int64_t task, void* scratch, void* shared) { kernels.backward(call, phase, task, scratch, shared); });
  return {checked.grad_query, checked.grad_key, checked.grad_value, checked.grad_key_bias, checked.grad_bias};
}

}  // namespace
}  // namespace dmattn::cpu

STABLE_TORCH_LIBRARY_IMPL(dmattn, CPU, m) {
  if (!dmattn::is_first_copy()) return;
  m.impl("backward", TORCH_BOX(&dmattn::cpu::backward_op));
}
