// One step of generation with a bounded cache: a new token goes in, and its queries attend. No torch.
#pragma once

#include "splits.h"

namespace dmattn::cuda {

// decode.p has the visible slots for its keys, their scores for its key_bias, no lengths and no pages. There are at most
// kMostFewRows rows, and one block or one cluster has all keys of a sequence.
struct StepCall {
  DecodeCall decode;
  CacheParams cache;
};

#if defined(__CUDACC__)
__host__ __device__
#endif
    inline const DecodeCall& decode_of(const DecodeCall& call) {
  return call;
}
#if defined(__CUDACC__)
__host__ __device__
#endif
    inline const DecodeCall& decode_of(const StepCall& call) {
  return call.decode;
}

}  // namespace dmattn::cuda
