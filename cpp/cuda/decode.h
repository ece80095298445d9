// Decoding on CUDA for those who have checked its arguments.
#pragma once

#include "../decode_arguments.h"
#include "decode_call.h"
#include "host/plan_decode.h"
#include "target.h"

namespace dmattn::cuda {

// Copies what the kernels could not read in pieces of 16 bytes.
void align_caches(CheckedDecode& checked);
DecodeCall call_of(const DecodeParams& p, const DecodePlan& plan, void* workspace);
// Plans, and enqueues the attention of `checked`.
void run_decode(CheckedDecode& checked, const Device& device, Clusters clusters = Clusters::kMayBe);

}  // namespace dmattn::cuda
