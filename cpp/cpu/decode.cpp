// Decoding on the CPU: checks and allocation; the arithmetic is in kernels.cpp and what it includes.
#include "decode.h"

#include "../decode_arguments.h"
#include "levels.h"
#include "phases.h"

namespace dmattn::cpu {

void run_decode(const DecodeParams& p) {
  if (p.batch * p.heads * p.queries == 0) return;
  const Kernels& kernels = best_kernels();
  run_phases(kernels.decode_sizes(p),
             [&](int phase, int64_t task, void* scratch, void* shared) { kernels.decode(p, phase, task, scratch, shared); });
}

namespace {

std::tuple<Tensor, Tensor> decode_op(const Tensor& query, const Tensor& key, const Tensor& value, std::optional<Tensor> lengths,
                                     std::optional<Tensor> page_table, std::optional<Tensor> key_bias,
                                     std::optional<Tensor> sinks, std::optional<Tensor> indices, bool is_causal, double scale,
                                     double softcap, int64_t index_block, int64_t index_local, int64_t index_sinks) {
  const CheckedDecode checked =
      check_decode(query, key, value, std::move(lengths), std::move(page_table), std::move(key_bias), std::move(sinks),
                   std::move(indices), is_causal, scale, softcap, {index_block, index_local, index_sinks});
  run_decode(checked.params);
  return {checked.out, checked.lse};
}

}  // namespace
}  // namespace dmattn::cpu

DMATTN_KERNELS(CPU, m) { m.impl("decode", TORCH_BOX(&dmattn::cpu::decode_op)); }
