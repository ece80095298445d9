// Key selection on CUDA: the host side. Nothing here waits for the device, so the op can be captured in a graph.
#include "../select_arguments.h"
#include "launch.h"
#include "target.h"

namespace dmattn::cuda {

Tensor select_op(const Tensor& scores, std::optional<Tensor> segment_end, int64_t window, bool is_causal, int64_t local,
                 int64_t sink) {
  const CheckedSelect checked = check_select(scores, std::move(segment_end), window, is_causal, local, sink);
  if (checked.params.length == 0) return checked.end;
  const Device device(scores);
  const OwnedWorkspace memory(scores, static_cast<int64_t>(select_workspace_bytes(checked.params)));
  DMATTN_CUDA_CHECK(launch_select(checked.params, memory.data(), device.stream()));
  return checked.end;
}

}  // namespace dmattn::cuda

DMATTN_KERNELS(CUDA, m) { m.impl("select", TORCH_BOX(&dmattn::cuda::select_op)); }
