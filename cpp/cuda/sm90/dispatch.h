// The sm90 family as the host sees it: forward and backward on Hopper, as plans say. Defined only where the build has the family.
#pragma once

#include "../calls.h"
#include "../host/plan.h"

namespace dmattn::cuda::sm90 {

// Does the driver make tensor maps?
bool has_tensor_maps();
// call.live_keys.tile_counter: one int of scratch where blocks draw tiles; zero where there are lists or ranges.
cudaError_t forward(const ForwardCall& call, const ForwardPlan& plan, cudaStream_t stream);
// One launch of the plan: `call` has the batches and heads of it. tile_counter: one int, zero.
cudaError_t backward(const BackwardCall& call, const BackwardPlan& plan, int* tile_counter, cudaStream_t stream);

}  // namespace dmattn::cuda::sm90
