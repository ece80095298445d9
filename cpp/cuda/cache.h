// The border between the host side of a bounded cache and its kernels: params in, work enqueued on a stream, no torch.
#pragma once

#include <cuda_runtime_api.h>

#include "../params.h"

namespace dmattn::cuda {

cudaError_t launch_cache_update(const CacheParams& p, cudaStream_t stream);
cudaError_t launch_cache_rewind(const CacheParams& p, cudaStream_t stream);

cudaError_t launch_cache_join(const JoinParams& join, cudaStream_t stream);

// workspace: int32 [cache_workspace(p)].
inline int64_t cache_workspace(const CacheParams& p) {
  return p.batch * p.kv_heads * (2 * static_cast<int64_t>(p.tokens) + p.slots);
}
cudaError_t launch_cache_extend(const CacheParams& p, int32_t* workspace, cudaStream_t stream);

}  // namespace dmattn::cuda
