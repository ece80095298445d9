// The sm90 family as the host sees it: forward on Hopper.
//
// The one surprise is the miss: cudaErrorNotSupported for what has no kernel here, which another family then takes.
#pragma once

#include "../attention_launch.h"

namespace dmattn::cuda::sm90 {

// call.plan.ticket: one int of scratch, which a plan has zeroed. processors: of the device.
cudaError_t forward(const ForwardCall& call, int processors, cudaStream_t stream);

}  // namespace dmattn::cuda::sm90
