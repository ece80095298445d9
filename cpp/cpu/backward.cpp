// Attention backward on the CPU: checks, allocation and the two loops over tasks; the arithmetic is in kernels.cpp.
#include <cstring>

#include "../arguments.h"
#include "levels.h"
#include "parallel.h"
#include "scratch.h"

namespace dmattn::cpu {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward_op(
    const Tensor& grad_out, std::optional<Tensor> grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& out, const Tensor& lse, std::optional<Tensor> start, std::optional<Tensor> end, std::optional<Tensor> tiles,
    std::optional<Tensor> rows, std::optional<Tensor> columns, std::optional<Tensor> bits, std::optional<Tensor> key_bias,
    std::optional<Tensor> bias, std::optional<Tensor> dropout_seed, bool is_causal, double scale, double softcap, double dropout_p,
    bool deterministic, bool need_key_bias, bool need_bias) {
  const CheckedBackward checked = check_backward(
      grad_out, grad_lse,
      check_attention(query, key, value, {start, end, tiles, rows, columns, bits, key_bias, bias, dropout_seed}, is_causal, scale,
                      softcap, dropout_p),
      out, lse, deterministic, need_key_bias, need_bias);
  const BackwardParams& p = checked.params;
  const Kernels& kernels = best_kernels();
  const int64_t workers = torch::stable::get_num_threads();
  const int64_t tasks = kernels.backward_tasks(p, workers), finish_tasks = kernels.backward_finish_tasks(p, workers);
  const Scratch scratch(worker_count(std::max(tasks, finish_tasks)), kernels.backward_scratch(p, workers));
  const size_t shared_bytes = kernels.backward_shared(p, workers);
  const Scratch shared(1, shared_bytes);
  std::memset(shared.of(0), 0, shared_bytes);
  for_each_task(tasks, [&](int64_t task, int64_t worker) { kernels.backward(p, workers, task, scratch.of(worker), shared.of(0)); });
  for_each_task(finish_tasks,
                [&](int64_t task, int64_t worker) { kernels.backward_finish(p, workers, task, scratch.of(worker), shared.of(0)); });
  return {checked.grad_query, checked.grad_key, checked.grad_value, checked.grad_key_bias, checked.grad_bias};
}

}  // namespace
}  // namespace dmattn::cpu

STABLE_TORCH_LIBRARY_IMPL(dmattn, CPU, m) { m.impl("backward", TORCH_BOX(&dmattn::cpu::backward_op)); }
