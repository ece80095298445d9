// The sm80 family as the host sees it: kernels, each of which picks its instance.
//
// Where no instance fits, the answer is cudaErrorNotSupported. compiled() lists the instances.
#pragma once

#include <string>

#include "../calls.h"
#include "../step.h"
#include "tiles.h"

namespace dmattn::cuda::sm80 {

cudaError_t forward(const ForwardCall& call, cudaStream_t stream);
cudaError_t backward_dq(const BackwardCall& call, SmemBudget smem_budget, cudaStream_t stream);
cudaError_t backward_dkdv(const BackwardCall& call, SmemBudget smem_budget, cudaStream_t stream);
// cudaErrorInvalidClusterSize: nothing was launched, because the device has no room for a cluster of so many blocks.
cudaError_t decode(const DecodeCall& call, cudaStream_t stream);
cudaError_t step(const StepCall& call, cudaStream_t stream);
std::string compiled();

}  // namespace dmattn::cuda::sm80
