// Reductions on CUDA: the host side. Nothing here waits for the device, so the ops can be captured in a graph.
#include "reduce.h"

#include "../reduce_arguments.h"
#include "runtime.h"

namespace dmattn::cuda {
namespace {

template <bool kIsMax>
Tensor reduce_op(const Tensor& input, std::optional<int64_t> dim, bool keepdim) {
  const Device device(input);
  const CheckedReduce checked = check_reduce(input, dim, keepdim, kIsMax);
  if (!checked.is_empty) DMATTN_CUDA_CHECK(launch_reduce(checked.params, device.stream()));
  return checked.out;
}

}  // namespace
}  // namespace dmattn::cuda

DMATTN_KERNELS(CUDA, m) {
  m.impl("reduce_sum", TORCH_BOX(&dmattn::cuda::reduce_op<false>));
  m.impl("reduce_max", TORCH_BOX(&dmattn::cuda::reduce_op<true>));
}
