// The border between the host side of reductions and their kernels: params in, work enqueued on a stream, no torch.
#pragma once

#include <cuda_runtime_api.h>

#include "../reduce_params.h"

namespace dmattn::cuda {

cudaError_t launch_reduce_max(const ReduceParams& p, cudaStream_t stream);
cudaError_t launch_reduce_sum(const ReduceParams& p, cudaStream_t stream);

inline cudaError_t launch_reduce(const ReduceParams& p, cudaStream_t stream) {
  return p.is_max ? launch_reduce_max(p, stream) : launch_reduce_sum(p, stream);
}

}  // namespace dmattn::cuda
