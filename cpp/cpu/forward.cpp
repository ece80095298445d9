// Attention forward on the CPU: checks and allocation; the arithmetic is in kernels.cpp and what it includes.
#include "../forward_arguments.h"
#include "levels.h"
#include "phases.h"

namespace dmattn::cpu {
namespace {

ForwardResults forward_op(AttentionArguments given) {
  const CheckedForward checked = check_forward(std::move(given));
  const AttentionParams& p = checked.inputs.params;
  check(!p.mask.index.entries.data, "indices: index lists have no kernel on the CPU yet");
  if (p.query_length == 0) return checked.results();
  const Kernels& kernels = best_kernels();
  run_phases(kernels.forward_sizes(p),
             [&](int phase, int64_t task, void* scratch, void* shared) { kernels.forward(p, phase, task, scratch, shared); });
  return checked.results();
}

}  // namespace
}  // namespace dmattn::cpu

DMATTN_KERNELS(CPU, m) { m.impl("forward", TORCH_BOX(&dmattn::unpack_forward<dmattn::cpu::forward_op>)); }
