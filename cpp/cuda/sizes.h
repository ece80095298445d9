// Sizes of lists of live keys and of sums in memory, which the host plans and kernels rely on. Plain C++, no CUDA.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "../params.h"

namespace dmattn::cuda {

inline constexpr int kMostDirectDim = 128;     // larger head sizes have no registers to look at all keys
inline constexpr int kBackwardUnionWords = 4;  // a tile of queries of Hopper's backward has at most 32 times so many
inline constexpr int kListBlock = 512;         // entries of a list that the portable scheduler reads at once
inline constexpr int kQueryPadding = 128;      // rows per (batch, head) of the per-query terms are a multiple of this

inline constexpr int kSegmentQueries = 768;  // queries of the shortest segments: whole tiles of 64, 128 or 192 rows
inline constexpr int kMostSegments = 2048;   // upper bound on the segments of a head
inline constexpr int kPartKeys = 4096;       // keys of a part: what a block looks at at a time while it finds live keys
inline constexpr int kPartGroups = 32;       // of a part's live keys, kPartKeys / kPartGroups each; the last have fewer or none
inline constexpr int kEntriesPerKey = 6;   // int32 entries reserved per key: its place among the live keys, and room in the lists
inline constexpr int kMostOneList = 4096;  // queries, and keys, of calls whose live keys may be one list: launch_one_list
inline constexpr int kOneSegment = 24;     // the shift of a single segment whose queries all see the same keys

// The segment that a query is in (with kOneSegment the first, whatever the query), how many segments so many queries are, and the
// first query of a segment.
DMATTN_HOST_DEVICE constexpr int segment_of(int query, int shift) { return (query / kSegmentQueries) >> shift; }
DMATTN_HOST_DEVICE constexpr int segments_at(int queries, int shift) { return segment_of(queries - 1, shift) + 1; }
DMATTN_HOST_DEVICE constexpr int first_query_of(int segment, int shift) { return (segment * kSegmentQueries) << shift; }

// Does a call gather live keys from lists? With a block mask keys come in order, intervals or not.
inline bool gathers(const AttentionParams& p) {
  return (p.mask.start.data || p.mask.end.data) && !p.mask.tiles.data && p.query_length > 0 && p.key_length > 0;
}

// The number of blocks per mask head that minimises rounds x (parts per block + 1), when `others` blocks run in the same launch.
// An H200 has kAtOnce multiprocessors: a second round takes as long as the first, and starting a block about as long as a part.
inline int64_t blocks_per_mask_head(int64_t parts, int64_t mask_heads, int64_t others) {
  constexpr int64_t kAtOnce = 132;
  int64_t best = 1, least = INT64_MAX;
  for (int64_t blocks = 1; blocks <= (parts < kAtOnce ? parts : kAtOnce); ++blocks) {
    const int64_t rounds = (mask_heads * blocks + others + kAtOnce - 1) / kAtOnce, each = (parts + blocks - 1) / blocks;
    if (rounds * (1 + each) < least) best = blocks, least = rounds * (1 + each);
  }
  return best;
}

// Queries for which BackwardCall::semaphores has an element: at most half of a chunk, which may be added in two pieces.
inline constexpr int kSemaphoreQueries = 32;

// Floats in a row of sums of `dim` elements.
constexpr int64_t sum_width(int64_t dim) { return (dim + 15) / 16 * 16; }

// How many query heads of a group have the same of all these rows? A row that is not given is the same for all.
inline int64_t heads_that_share(const AttentionParams& p, std::initializer_list<const PerHead*> rows) {
  int64_t heads = p.heads / p.kv_heads;
  for (const PerHead* row : rows) {
    if (row->data && row->head_divisor < heads) heads = row->head_divisor;
  }
  return heads;
}

// Floats of a row of key_sums.
constexpr int64_t key_sum_width(const AttentionParams& p) { return sum_width(p.head_dim) + sum_width(p.value_dim); }

}  // namespace dmattn::cuda
