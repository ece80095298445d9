// Attention forward on the CPU: checks and allocation; the arithmetic is in kernels.cpp and what it includes.
#include "../forward_arguments.h"
#include "levels.h"
#include "phases.h"

namespace dmattn::cpu {
namespace {

CheckedForward forward_op(AttentionArguments given, bool wants_rest) {
  CheckedForward checked = check_forward(std::move(given), wants_rest);
  const AttentionParams& p = checked.inputs.params;
  if (p.query_length == 0) return checked;
  const Kernels& kernels = best_kernels();
  run_phases(kernels.forward_sizes(p),
             [&](int phase, int64_t task, void* scratch, void* shared) { kernels.forward(p, phase, task, scratch, shared); });
  return checked;
}

}  // namespace
}  // namespace dmattn::cpu

DMATTN_KERNELS(CPU, m) {
  m.impl("forward", TORCH_BOX(&dmattn::unpack_forward<dmattn::cpu::forward_op>));
  m.impl("forward_plain", TORCH_BOX((&dmattn::unpack_forward_plain<dmattn::cpu::forward_op, dmattn::cpu::select_op>)));
}
