// The kernels of short selections.
#include "counts.cuh"
#include "short.cuh"

namespace dmattn::cuda::selection {

cudaError_t launch_short(const SelectParams& p, int32_t window, cudaStream_t stream) {
  return is_counted(p) ? launch_select_by_counts(p, window, stream) : launch_select_short(p, window, stream);
}

}  // namespace dmattn::cuda::selection
