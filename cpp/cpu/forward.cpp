// Attention forward on the CPU: checks and allocation; the arithmetic is in kernels.cpp and what it includes.
#include "../arguments.h"
#include "levels.h"
#include "phases.h"

namespace dmattn::cpu {
namespace {

std::tuple<Tensor, Tensor, Tensor> forward_op(const Tensor& query, const Tensor& key, const Tensor& value,
                                              std::optional<Tensor> start, std::optional<Tensor> end, std::optional<Tensor> tiles,
                                              std::optional<Tensor> rows, std::optional<Tensor> columns,
                                              std::optional<Tensor> bits, std::optional<Tensor> key_bias,
                                              std::optional<Tensor> bias, std::optional<Tensor> dropout_seed, bool is_causal,
                                              double scale, double softcap, double dropout_p,
                                              bool /*deterministic: for backward*/) {
  CheckedForward checked =
      check_forward(query, key, value, {start, end, tiles, rows, columns, bits, key_bias, bias, dropout_seed}, is_causal, scale,
                    softcap, dropout_p);
  const AttentionParams& p = checked.inputs.params;
  if (p.query_length == 0) return {checked.out, checked.lse, checked.lse_rest};
  const Kernels& kernels = best_kernels();
  run_phases(kernels.forward_sizes(p),
             [&](int phase, int64_t task, void* scratch, void* shared) { kernels.forward(p, phase, task, scratch, shared); });
  return {checked.out, checked.lse, checked.lse_rest};
}

}  // namespace
}  // namespace dmattn::cpu

STABLE_TORCH_LIBRARY_IMPL(dmattn, CPU, m) {
  if (!dmattn::is_first_copy()) return;
  m.impl("forward", TORCH_BOX(&dmattn::cpu::forward_op));
}
