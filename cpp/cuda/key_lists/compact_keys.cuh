// Whether a mask head has compact keys. The kernel that copies them and the kernels that read them ask here.
#pragma once

#include "../calls.h"

namespace dmattn::cuda {

__device__ __forceinline__ bool is_compact(const ForwardCall& call, int64_t mask_head) {
  return call.compact.key && call.live_keys.shift[mask_head] == kOneSegment &&
         call.live_keys.count[mask_head] <= call.compact.capacity;
}

}  // namespace dmattn::cuda
