// Lists of live keys, ranges of keys or an order of query tiles, made on the device in the memory that a plan gives them.
#pragma once

#include "host/workspace.h"
#include "live_keys.h"

namespace dmattn::cuda {

// memory: lists.elements int32. Where the plan has no lists, the result is empty and nothing is launched.
LiveKeys find_keys(const AttentionParams& p, const KeyLists& lists, int32_t* memory, cudaStream_t stream);

}  // namespace dmattn::cuda
