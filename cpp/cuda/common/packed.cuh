// Which rows of a plan have their live keys packed: the kernel that packs and those that read ask here.
#pragma once

#include "../attention_launch.h"

namespace dmattn::cuda {

__device__ __forceinline__ bool is_packed(const ForwardCall& call, int64_t row) {
  return call.packed.key && call.plan.shift[row] == kOneSegment && call.plan.count[row] <= call.packed.capacity;
}

}  // namespace dmattn::cuda
