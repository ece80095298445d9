// Attention forward on the CPU: checks, allocation and the loop over tasks; the arithmetic is in kernels.cpp.
#include "../arguments.h"
#include "levels.h"
#include "parallel.h"
#include "scratch.h"

namespace dmattn::cpu {
namespace {

std::tuple<Tensor, Tensor> forward_op(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<Tensor> start,
                                      std::optional<Tensor> end, std::optional<Tensor> tiles, std::optional<Tensor> rows,
                                      std::optional<Tensor> columns, std::optional<Tensor> bits, std::optional<Tensor> key_bias,
                                      std::optional<Tensor> bias, std::optional<Tensor> dropout_seed, bool is_causal, double scale,
                                      double softcap, double dropout_p) {
  CheckedForward checked = check_forward(query, key, value, {start, end, tiles, rows, columns, bits, key_bias, bias, dropout_seed},
                                         is_causal, scale, softcap, dropout_p);
  const AttentionParams& p = checked.inputs.params;
  const Kernels& kernels = best_kernels();
  const int64_t tasks = kernels.forward_tasks(p);
  Scratch scratch(worker_count(tasks), kernels.forward_scratch(p));
  for_each_task(tasks, [&](int64_t task, int64_t worker) { kernels.forward(p, task, scratch.of(worker)); });
  return {checked.out, checked.lse};
}

}  // namespace
}  // namespace dmattn::cpu

STABLE_TORCH_LIBRARY_IMPL(dmattn, CPU, m) { m.impl("forward", TORCH_BOX(&dmattn::cpu::forward_op)); }
