// The loss of an indexer on the CPU: a query of a group at a time.
#include "../index_loss_arguments.h"
#include "levels.h"
#include "limits.h"
#include "parallel.h"
#include "scratch.h"

namespace dmattn::cpu {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> index_loss_op(
    const Tensor& logits, const Tensor& products, const Tensor& weights, std::optional<Tensor> slope,
    std::optional<Tensor> key_bias, std::optional<Tensor> lse, const Tensor& positions, std::optional<Tensor> lists,
    std::optional<Tensor> start, std::optional<Tensor> end, int64_t key_length, int64_t block_size, bool is_pooled,
    bool is_causal, int64_t local, int64_t sink, double scale, double softcap, double index_scale, bool sharp, bool to_bfloat16) {
  check(!to_bfloat16, "to_bfloat16: expected False on the CPU, got True");
  const CheckedIndexLoss checked(logits, products, weights, slope, key_bias, lse, positions, lists, start, end, key_length,
                                 block_size, is_pooled, is_causal, local, sink, scale, softcap, index_scale, sharp, to_bfloat16);
  const IndexLossParams& p = checked.params;
  const Kernels& kernels = best_kernels();
  const int64_t tasks = p.batch * p.groups * p.rows;
  const Scratch scratch(worker_count(tasks), kernels.index_loss_scratch_bytes(p));
  for_each_task(tasks, [&](int64_t task, int64_t worker) { kernels.index_loss(p, task, scratch.of(worker)); });
  return {checked.losses, checked.of_products, checked.of_weights, checked.of_slopes};
}

}  // namespace
}  // namespace dmattn::cpu

DMATTN_KERNELS(CPU, m) { m.impl("index_loss", TORCH_BOX(&dmattn::cpu::index_loss_op)); }
