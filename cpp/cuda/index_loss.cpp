// The loss of an indexer on CUDA: the host side. Nothing here waits for the device.
#include "../index_loss_arguments.h"
#include "../index_loss_row.h"
#include "launch.h"
#include "runtime.h"

namespace dmattn::cuda {
namespace {

void run_index_loss(const CheckedIndexLoss& checked) {
  const Device device(checked.logits);
  const IndexLossParams& p = checked.params;
  const int64_t numbers = 2 * p.batch * p.groups * p.rows * index_loss_stride(p);
  const Tensor workspace = empty_on(checked.logits, {numbers}, checked.logits.scalar_type());
  DMATTN_CUDA_CHECK(launch_index_loss(p, workspace.data_ptr(), device.stream()));
}

}  // namespace
}  // namespace dmattn::cuda

DMATTN_KERNELS(CUDA, m) { m.impl("index_loss", TORCH_BOX(&dmattn::index_loss_op<dmattn::cuda::run_index_loss>)); }
