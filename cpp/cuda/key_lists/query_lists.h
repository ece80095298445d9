// Index lists turned over: for each tile of keys the queries that list one of its blocks. Plain C++, no CUDA.
//
// For backward with blocks of kListedKeys keys or more. A tile of keys then meets just the queries that list a block of it,
// however little the lists of neighbouring queries have in common, and its gradients stay in registers while kRangeQueries pass.
// A bit for each kListedKeys keys says which of them a query lists. Local keys, sinks, causality and intervals are not in the
// bits: kernels test them.
#pragma once

#include <cstdint>

#include "../../params.h"

namespace dmattn::cuda {

inline constexpr int kListedTileKeys = 128;  // of a tile
inline constexpr int kListedKeys = 16;       // that share a bit
inline constexpr int kListQueries = 64;      // neighbouring queries that are counted together
inline constexpr int kListedQueryBits = 24;  // of an entry; the bits of the tile's keys are above them
inline constexpr int kRangeQueries = 8192;  // that a tile of keys meets at a time, so that they stay in L2 for the tiles after it
inline constexpr uint32_t kNoListedQuery = (1u << kListedQueryBits) - 1;

// There are as many mask heads as the lists of a call tell apart.
struct QueryLists {
  uint32_t* entries = nullptr;  // [mask heads, capacity]: the lists of a head's tiles one after the other, each ascending; null:
                                // there are none
  int32_t* begin = nullptr;     // [mask heads, tiles + 1]: where the list of a tile begins
  int32_t* places = nullptr;    // [mask heads, tiles, query_blocks]: where in the list of a tile kListQueries queries begin
  int tiles = 0, query_blocks = 0;
  int64_t capacity = 0;
  int64_t batch_stride = 0;  // 0 or heads, counted in mask heads
  int64_t batches = 1, heads = 1, head_divisor = 1;

  DMATTN_HOST_DEVICE int64_t mask_head_of(int batch, int head) const {
    return batch * batch_stride + head / static_cast<int>(head_divisor);
  }
  // The entry of a tile's list that is the first of query `first_query` or a later one, for multiples of kListQueries.
  DMATTN_HOST_DEVICE int32_t first_entry(int64_t mask_head, int tile, int first_query) const {
    const int32_t* const begins = begin + mask_head * (tiles + 1) + tile;
    const int block = first_query / kListQueries;
    return block < query_blocks ? begins[0] + places[(mask_head * tiles + tile) * query_blocks + block] : begins[1];
  }
};

}  // namespace dmattn::cuda
