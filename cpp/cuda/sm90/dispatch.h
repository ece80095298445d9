// The sm90 family as the host sees it: forward and backward on Hopper.
//
// A call without a kernel here is answered with cudaErrorNotSupported, and then another family takes it.
#pragma once

#include "../calls.h"
#include "../key_ways.h"

namespace dmattn::cuda::sm90 {

// Does the family have a forward kernel for the call? Asked before its live keys are found.
bool has_forward(const AttentionParams& p);
// How forward comes to the keys of such a call. kDirect is LiveKeys::is_direct: a tile reads the spans of all keys, or there are
// no intervals, only a key_bias, and the gathered variant takes keys in order. kAllKeys: there are intervals, and no live keys.
KeyWay forward_way(const AttentionParams& p, int processors);
// Where forward takes the keys of a call for which that is kLists in order all the same: LiveKeys::range_queries; otherwise 0.
int forward_range_queries(const AttentionParams& p);
// call.live_keys.tile_counter: one int of scratch, zero where there are lists or ranges. processors: of the device.
cudaError_t forward(const ForwardCall& call, int processors, cudaStream_t stream);

// Has the call to get a bias, of zeros, before all else? In backward only the variants with a bias have an exact tanh, for the
// largest and the smallest softcaps, and hide scores after they are scaled, so that -inf stays that with scales up to 0.
bool backward_needs_bias(const AttentionParams& p);
// Does the family have a backward kernel for the call? It needs query_sums in tiles; with a block mask, or intervals
// and keys in order, `seen`; and with gathered live keys key_sums, unless head sizes are up to 128, there is one segment and the
// heads of a group share it. A deterministic call needs semaphores; in it the heads of a group have to share their intervals and,
// where keys are gathered or heads wide, their key_bias.
bool has_backward(const AttentionParams& p, bool deterministic);
// Does backward take the call's keys in order, although it has intervals? Then it needs no live keys.
bool backward_schedules_in_order(const AttentionParams& p, bool deterministic, int processors);
// Where keys come in order: how many query heads of a group a block takes one after the other. The whole group, whose gradients
// then stay in registers, or fewer, whose gradients are added up in key_sums: where intervals differ, those that share them, and
// where there would be so few work tiles that blocks would end at different times.
int64_t backward_heads_at_once(const AttentionParams& p, int processors);
// tile_counter: one int, zero.
cudaError_t backward(const BackwardCall& call, int* tile_counter, int processors, cudaStream_t stream);

}  // namespace dmattn::cuda::sm90
