// The loss of an indexer on the CPU: a query of a group at a time.
#include "../index_loss_arguments.h"
#include "levels.h"
#include "limits.h"
#include "parallel.h"
#include "scratch.h"

namespace dmattn::cpu {
namespace {

void run_index_loss(const CheckedIndexLoss& checked) {
  const IndexLossParams& p = checked.params;
  check(!p.to_bfloat16, "to_bfloat16: expected False on the CPU, got True");
  const Kernels& kernels = best_kernels();
  const int64_t tasks = p.batch * p.groups * p.rows;
  const Scratch scratch(worker_count(tasks), kernels.index_loss_scratch_bytes(p));
  for_each_task(tasks, [&](int64_t task, int64_t worker) { kernels.index_loss(p, task, scratch.of(worker)); });
}

}  // namespace
}  // namespace dmattn::cpu

DMATTN_KERNELS(CPU, m) { m.impl("index_loss", TORCH_BOX(&dmattn::index_loss_op<dmattn::cpu::run_index_loss>)); }
