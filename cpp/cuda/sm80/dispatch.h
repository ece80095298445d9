// The sm80 family as the host sees it. A plan names the instance, which the build has.
#pragma once

#include "../calls.h"
#include "../decode_call.h"
#include "../host/instances.h"

namespace dmattn::cuda::sm80 {

cudaError_t forward(const ForwardCall& call, const Instance& instance, cudaStream_t stream);
cudaError_t backward_dq(const BackwardCall& call, const Instance& instance, cudaStream_t stream);
cudaError_t backward_dkdv(const BackwardCall& call, const Instance& instance, cudaStream_t stream);
// cudaErrorInvalidClusterSize: nothing was launched, because the device has no room for a cluster of so many blocks.
cudaError_t decode(const DecodeCall& call, const Instance& instance, cudaStream_t stream);
cudaError_t step(const StepCall& call, const Instance& instance, cudaStream_t stream);

}  // namespace dmattn::cuda::sm80
