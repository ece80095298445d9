// Which keys do the queries of a call see: lists of live keys as kernels read them, and how they are made on the device. No
// torch.
//
// The live keys of a call are found once (launch_live_keys: which keys does any query see, and which does each segment of the
// queries see?), then a family runs it. Segments are as short as their lists fit into memory that grows with the number of keys
// alone, or somewhat longer (`lengthens`); a whole head's queries are one segment if need be, so no bound can overflow.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "../params.h"

namespace dmattn::cuda {

inline constexpr int kListBlock = 512;     // keys of a list that the portable walk reads at once
inline constexpr int kQueryPadding = 128;  // rows per (batch, head) of the per-query terms are a multiple of this

inline constexpr int kSegmentQueries = 768;  // of the shortest segments: whole tiles of 64, 128 or 192 rows
inline constexpr int kMostSegments = 2048;   // of the queries
inline constexpr int kPartKeys = 4096;       // keys that a block of the kernels that find live keys looks at at a time
inline constexpr int kPartGroups = 32;       // of a part's live keys: kPartKeys / kPartGroups in each, fewer or none in the last
inline constexpr int kEntriesPerKey = 6;  // int32 entries reserved per key: its place among the live keys, and room in the lists
inline constexpr int kOneSegment = 24;    // the shift that says so: all queries see the same keys

// The live keys of each mask head, in key order, and those of each segment of the queries. Mask heads are
// as many as start and end together tell apart.
struct LiveKeys {
  int32_t* index = nullptr;  // [mask heads, capacity]: the live keys, where they are read, then the lists; null: no lists, all
                             // keys are taken in order
  int2* span = nullptr;      // [mask heads, capacity]: the key's span of positions, causality included
  int32_t* count = nullptr;  // [mask heads]: live keys
  int32_t* shift = nullptr;  // [mask heads]: a segment is 2^shift * kSegmentQueries queries
  int shortest = 0;          // shift of the shortest segments
  int2* lists = nullptr;     // [mask heads, most_lists]: where in index and span the list of a segment begins, and its length
  int4* groups = nullptr;    // [mask heads, parts, kPartGroups], scratch: neighbouring live keys, where they begin, how many they
                             // are, and the positions between which some see some of them
  int64_t count_blocks = 0;  // that share the parts of a mask head where they are counted
  int32_t* counts = nullptr;     // [mask heads, count_blocks, 2, segments], scratch; so are the next two
  int32_t* partial = nullptr;    // [mask heads, count_blocks]: are some of their keys seen by a part of the queries only?
  int32_t* live = nullptr;       // [mask heads, parts]: how many of the part's keys are seen at all
  int32_t* ticket = nullptr;     // one int: tiles handed out to blocks as they come free; launch_live_keys zeroes it
  int32_t* row_flags = nullptr;  // one int for backward (BackwardCall::row_flags); launch_live_keys zeroes it
  bool keeps_live = false;       // are the live keys read, even where no list is made of them?
  bool joins = false;            // are all queries one segment (of shift kOneSegment) when each of them sees all live keys?
  bool lengthens = false;        // are segments longer than they need be, where their lists are then hardly longer?
  int64_t capacity = 0;          // kEntriesPerKey * Sk, for one segment just Sk
  int64_t most_lists = 0;        // that a mask head may have
  int64_t parts = 0;             // of kPartKeys keys
  int64_t batch_stride = 0;      // 0 or heads, counted in mask heads
  int64_t batches = 0, heads = 0, head_divisor = 1;

  // The mask head of a query head.
  __host__ __device__ int64_t mask_head_of(int batch, int head) const {
    return batch * batch_stride + head / static_cast<int>(head_divisor);
  }

  // With a block mask: in which order to start tiles of kQueryPadding queries, null: as they are numbered.
  int32_t* order = nullptr;  // [B * H * ceil(Sq / kQueryPadding)]
};

// The segment of a query, with kOneSegment the first for any; how many segments some queries are; the first query of one of
// several.
__host__ __device__ constexpr int segment_of(int query, int shift) { return query / kSegmentQueries >> shift; }
__host__ __device__ constexpr int segments_at(int queries, int shift) { return segment_of(queries - 1, shift) + 1; }
__host__ __device__ constexpr int first_query_of(int segment, int shift) { return segment * kSegmentQueries << shift; }

// Does a call gather live keys from lists? With a block mask keys come in order, intervals or not.
inline bool gathers(const AttentionParams& p) {
  return (p.mask.start.data || p.mask.end.data) && !p.mask.tiles.data && p.query_length > 0 && p.key_length > 0;
}

// The number of blocks per mask head that minimises rounds x (parts per block + 1), beside `others` blocks. An H200 has kAtOnce
// multiprocessors: a second round takes as long as the first, and starting a block takes about as long as a part.
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
cudaError_t launch_order(const AttentionParams& p, const LiveKeys& live_keys, cudaStream_t stream);

}  // namespace dmattn::cuda
