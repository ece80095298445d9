// Decoding on CUDA for those who have checked its arguments.
#pragma once

#include "../decode_arguments.h"
#include "runtime.h"

namespace dmattn::cuda {

// Enqueues the attention of `checked`. With a cache its new token is taken in first: in the same kernel where there is one for
// it.
void run_decode(CheckedDecode& checked, const Device& device, const CacheParams* cache = nullptr);

}  // namespace dmattn::cuda
