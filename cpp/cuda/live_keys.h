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

#include "key_lists/key_unions.h"
#include "key_lists/query_lists.h"
#include "sizes.h"

namespace dmattn::cuda {

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

  // There are no lists, and keys are taken in order. A range says from the first to the last key that some of range_queries
  // neighbouring queries see: Sk minus the first, and the one behind the last; 0 where none is seen.
  int2* ranges = nullptr;  // [mask heads, range_count]
  int64_t range_count = 0;
  int range_queries = 0;  // as many as the rows of a tile

  KeyUnions unions;        // of a call with index lists
  QueryLists query_lists;  // of a backward call with index lists of blocks, in place of unions

  // Are keys gathered, from lists, without or from unions?
  __host__ __device__ bool gathers() const { return index || is_direct || unions.key; }

  // With a block mask: in which order to start tiles of kQueryPadding queries, null: as they are numbered.
  int32_t* order = nullptr;  // [B * H * ceil(Sq / kQueryPadding)]
};

cudaError_t launch_live_keys(const AttentionParams& p, const LiveKeys& live_keys, cudaStream_t stream);
// One list for all queries, up to kMostOneList of them and of keys: `shortest` says that they are one segment.
cudaError_t launch_one_list(const AttentionParams& p, const LiveKeys& live_keys, cudaStream_t stream);
// ranges, and the tile counter behind them, which is set to zero.
cudaError_t launch_key_ranges(const AttentionParams& p, const LiveKeys& live_keys, cudaStream_t stream);
// The lists of unions.tiles tiles of queries of each mask head. Clears tile_counter, if given.
cudaError_t launch_key_unions(const AttentionParams& p, const KeyUnions& unions, int32_t* tile_counter, cudaStream_t stream);
// The lists of all tiles of keys of each mask head.
cudaError_t launch_query_lists(const AttentionParams& p, const QueryLists& lists, cudaStream_t stream);
cudaError_t launch_order(const AttentionParams& p, const LiveKeys& live_keys, cudaStream_t stream);

}  // namespace dmattn::cuda
