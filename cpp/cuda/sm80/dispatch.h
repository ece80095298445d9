// The sm80 family as the host sees it. Of attention's kernels a plan names the instance, which the build has.
#pragma once

#include <string>

#include "../calls.h"
#include "../host/instances.h"
#include "../step.h"

namespace dmattn::cuda::sm80 {

cudaError_t forward(const ForwardCall& call, const Instance& instance, cudaStream_t stream);
cudaError_t backward_dq(const BackwardCall& call, const Instance& instance, cudaStream_t stream);
cudaError_t backward_dkdv(const BackwardCall& call, const Instance& instance, cudaStream_t stream);
// Decoding picks its instance itself: cudaErrorNotSupported where none fits, and compiled_decode() lists them.
// cudaErrorInvalidClusterSize: nothing was launched, because the device has no room for a cluster of so many blocks.
cudaError_t decode(const DecodeCall& call, cudaStream_t stream);
cudaError_t step(const StepCall& call, cudaStream_t stream);
std::string compiled_decode();

}  // namespace dmattn::cuda::sm80
