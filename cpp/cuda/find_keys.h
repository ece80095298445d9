// Lists of live keys, ranges of keys or an order of query tiles, made on the device in the memory that a plan gives them.
#pragma once

#include "host/workspace.h"
#include "live_keys.h"

namespace dmattn::cuda {

// The unions of the tiles from first_tile on, as many as are made at once. workspace: the call's. Clears tile_counter, if given.
KeyUnions find_unions(const AttentionParams& p, const KeyUnionLists& lists, void* workspace, int first_tile,
                      int32_t* tile_counter, cudaStream_t stream);

// The lists of queries of each tile of keys. workspace: the call's.
QueryLists find_query_lists(const AttentionParams& p, const QueryListPlan& plan, void* workspace, cudaStream_t stream);

// Calls launch(round) for each round of unions, which the round's live_keys have, or once where the call has no index lists.
template <class Call, class Launch>
void for_each_round(const Call& call, const AttentionParams& p, const KeyUnionLists& lists, void* workspace,
                    int32_t* tile_counter, cudaStream_t stream, const Launch& launch) {
  Call round = call;
  for (int first_tile = 0; first_tile < lists.tiles; first_tile += lists.at_once) {
    round.live_keys.unions = find_unions(p, lists, workspace, first_tile, tile_counter, stream);
    launch(round);
  }
  if (lists.tiles == 0) launch(call);
}

// memory: lists.elements int32. Where the plan has no lists, the result is empty and nothing is launched.
LiveKeys find_keys(const AttentionParams& p, const KeyLists& lists, int32_t* memory, cudaStream_t stream);

}  // namespace dmattn::cuda
