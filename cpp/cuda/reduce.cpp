// Reductions on CUDA: the host side. Nothing here waits for the device, so the ops can be captured in a graph.
#include "reduce.h"

#include "../reduce_arguments.h"
#include "runtime.h"

namespace dmattn::cuda {
namespace {

Tensor reduce(const char* name, const Tensor& input, std::optional<int64_t> dim, bool keepdim, bool is_max) {
  const Device device(input);
  const CheckedReduce checked = check_reduce(name, input, dim, keepdim, is_max);
  if (!checked.is_empty) DMATTN_CUDA_CHECK(launch_reduce(checked.params, device.stream()));
  return checked.out;
}

Tensor reduce_sum_op(const Tensor& input, std::optional<int64_t> dim, bool keepdim) {
  return reduce("reduce_sum", input, dim, keepdim, false);
}

Tensor reduce_max_op(const Tensor& input, std::optional<int64_t> dim, bool keepdim) {
  return reduce("reduce_max", input, dim, keepdim, true);
}

}  // namespace
}  // namespace dmattn::cuda

DMATTN_KERNELS(CUDA, m) {
  if (!dmattn::is_first_copy()) return;
  m.impl("reduce_sum", TORCH_BOX(&dmattn::cuda::reduce_sum_op));
  m.impl("reduce_max", TORCH_BOX(&dmattn::cuda::reduce_max_op));
}
