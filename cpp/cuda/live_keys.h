// Lists of live keys as kernels read them. No torch.
//
// launch_live_keys finds the live keys of a call once, before a family runs it: those that any query sees, and for each segment
// of the queries those that some query of it sees. The memory for lists grows with the number of keys alone. So segments are as
// short as their lists still fit, or somewhat longer (`lengthens`); if need be a whole head's queries are one segment, so lists
// always fit.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../params.h"

namespace dmattn::cuda {

inline constexpr int kMostDirectDim = 128;  // larger head sizes have no registers for a scheduler without lists
inline constexpr int kListBlock = 512;      // entries of a list that the portable scheduler reads at once
inline constexpr int kQueryPadding = 128;   // rows per (batch, head) of the per-query terms are a multiple of this

inline constexpr int kSegmentQueries = 768;  // queries of the shortest segments: whole tiles of 64, 128 or 192 rows
inline constexpr int kMostSegments = 2048;   // upper bound on the segments of a head
inline constexpr int kPartKeys = 4096;       // keys of a part: what a block looks at at a time while it finds live keys
inline constexpr int kPartGroups = 32;       // of a part's live keys, kPartKeys / kPartGroups each; the last have fewer or none
inline constexpr int kEntriesPerKey = 6;   // int32 entries reserved per key: its place among the live keys, and room in the lists
inline constexpr int kMostOneList = 4096;  // queries, and keys, of calls whose live keys may be one list: launch_one_list
inline constexpr int kOneSegment = 24;     // the shift of a single segment whose queries all see the same keys

// The live keys of each mask head, in key order, and those of each segment of its queries, in key order unless by_lifetime says
// otherwise. The single list that launch_one_list makes has an order of its own and needs no scratch. There are as many
// mask heads as start and end together tell apart.
struct LiveKeys {
  int32_t* index = nullptr;  // [mask heads, capacity]: the live keys (if anything reads them), then the lists of the segments;
                             // null: there are no lists, and keys are taken in order
  int2* span = nullptr;      // [mask heads, capacity]: the spans of those keys
  int32_t* count = nullptr;  // [mask heads]: how many keys are live
  int32_t* shift = nullptr;  // [mask heads]: a segment is 2^shift * kSegmentQueries queries
  int shortest = 0;          // the smallest shift that is considered
  int2* lists = nullptr;     // [mask heads, most_lists]: where in index and span the list of a segment begins, and its length
  // Scratch of the kernels that make the lists. A group is some neighbouring live keys: where they begin, how many they are, and
  // the first and last position of their spans together.
  int4* groups = nullptr;           // [mask heads, parts, kPartGroups]
  int64_t count_blocks = 0;         // blocks that share the parts of a mask head while they are counted
  int32_t* counts = nullptr;        // [mask heads, count_blocks, 2, segments]
  int32_t* partial = nullptr;       // [mask heads, count_blocks]: does a block have live keys that only some queries see?
  int32_t* live = nullptr;          // [mask heads, parts]: how many of a part's keys are live
  int32_t* tile_counter = nullptr;  // one int: tiles that blocks have drawn; zeroed with the lists
  int32_t* row_flags = nullptr;     // one int for backward (BackwardCall::row_flags); likewise
  bool keeps_live = false;          // are the live keys read, even where no list is made of them?
  bool joins = false;               // are all queries one segment (of shift kOneSegment) when each of them sees all live keys?
  bool by_lifetime = false;  // with several parts of keys: do those that a segment's last query sees come first in its list?
  bool lengthens = false;    // are segments longer than they need be, where their lists are then hardly longer?
  int64_t capacity = 0;      // kEntriesPerKey * Sk, for one segment just Sk
  int64_t most_lists = 0;    // lists that a mask head may have
  int64_t parts = 0;         // parts of kPartKeys keys
  int64_t batch_stride = 0;  // 0 or heads, counted in mask heads
  int64_t batches = 0, heads = 0, head_divisor = 1;

  // The mask head of a query head.
  __host__ __device__ int64_t mask_head_of(int batch, int head) const {
    return batch * batch_stride + head / static_cast<int>(head_divisor);
  }

  // There are no lists: the scheduler looks up the spans of all keys that a tile may see. For short sequences, where making lists
  // takes longer than reading what is not in them, and for a key_bias without intervals, where there are no spans to look up.
  bool is_direct = false;
  // Are keys gathered, from lists or without?
  __host__ __device__ bool gathers() const { return index || is_direct; }

  // There are no lists, and keys are taken in order. A range says from the first to the last key that some of range_queries
  // neighbouring queries see: Sk minus the first, and the one behind the last; 0 where none is seen.
  int2* ranges = nullptr;  // [mask heads, range_count]
  int64_t range_count = 0;
  int range_queries = 0;  // as many as the rows of a tile

  // With a block mask: in which order to start tiles of kQueryPadding queries, null: as they are numbered.
  int32_t* order = nullptr;  // [B * H * ceil(Sq / kQueryPadding)]
};

// The segment that a query is in (with kOneSegment the first, whatever the query), how many segments so many queries are, and the
// first query of a segment.
__host__ __device__ constexpr int segment_of(int query, int shift) { return (query / kSegmentQueries) >> shift; }
__host__ __device__ constexpr int segments_at(int queries, int shift) { return segment_of(queries - 1, shift) + 1; }
__host__ __device__ constexpr int first_query_of(int segment, int shift) { return (segment * kSegmentQueries) << shift; }

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

cudaError_t launch_live_keys(const AttentionParams& p, const LiveKeys& live_keys, cudaStream_t stream);
// One list for all queries, up to kMostOneList of them and of keys: `shortest` says that they are one segment.
cudaError_t launch_one_list(const AttentionParams& p, const LiveKeys& live_keys, cudaStream_t stream);
// ranges, and the tile counter behind them, which is set to zero.
cudaError_t launch_key_ranges(const AttentionParams& p, const LiveKeys& live_keys, cudaStream_t stream);
cudaError_t launch_order(const AttentionParams& p, const LiveKeys& live_keys, cudaStream_t stream);

}  // namespace dmattn::cuda
