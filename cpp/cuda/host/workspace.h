// The memory of a call beside its arguments and results: one allocation, cut into regions. And what lists of live keys are made
// of.
#pragma once

#include "../key_lists/key_unions.h"
#include "../key_lists/query_lists.h"
#include "../sizes.h"

namespace dmattn::cuda {

// A piece of the workspace. bytes == 0: it is not there.
struct Region {
  int64_t offset = 0, bytes = 0;

  template <class T>
  T* in(void* workspace) const {
    return bytes > 0 ? reinterpret_cast<T*>(static_cast<char*>(workspace) + offset) : nullptr;
  }
};

inline constexpr int64_t kRegionAlignment = 256;

// Puts a region behind those before it. `bytes` counts what they all take.
inline Region add_region(int64_t& bytes, int64_t size) {
  const Region region{bytes, size};
  bytes += (size + kRegionAlignment - 1) / kRegionAlignment * kRegionAlignment;
  return region;
}

// Lists of live keys, ranges of keys, or an order of query tiles; LiveKeys (live_keys.h) says what the fields mean. Offsets count
// int32 from the beginning of the region.
struct KeyLists {
  enum class Kind : int32_t { kNone, kLists, kOneList, kRanges, kTileOrder } kind = Kind::kNone;
  int64_t batches = 1, heads = 0, head_divisor = 1;  // mask heads: start and end have so many rows together
  // kLists, kOneList:
  bool keeps_live = false, joins = false, by_lifetime = false, lengthens = false;
  int shortest = 0;
  int64_t capacity = 0, most_lists = 0, parts = 0, count_blocks = 0;
  int64_t span = 0, lists = 0, index = 0, counts = 0, partial = 0, live = 0, count = 0, shift = 0, tile_counter = 0;
  // kRanges:
  int range_queries = 0;
  int64_t range_count = 0;

  int64_t elements = 0;  // int32 entries of all of it

  bool has_lists() const { return kind == Kind::kLists || kind == Kind::kOneList; }
};

// The unions of index lists (key_lists/key_unions.h) and the order in which they are made: `at_once` tiles of queries of each
// mask head, which the workspace has room for, then the next ones.
struct KeyUnionLists {
  int queries = 0, words = 0;  // of a tile; queries == 0: the call has no index lists
  int groups = 1, chunk = 0;   // by which keys are sorted, as KeyUnions has them
  int tiles = 0, at_once = 0;
  int64_t capacity = 0;
  int64_t batches = 1, heads = 1, head_divisor = 1;
  Region key, seen, count;

  int64_t lists_at_once() const { return batches * heads * at_once; }
};

// For kernels whose tiles have so many queries; bytes: as in add_region.
KeyUnionLists plan_unions(const AttentionParams& p, int64_t queries, int64_t& bytes);

// Index lists turned over (key_lists/query_lists.h).
struct QueryListPlan {
  int tiles = 0, query_blocks = 0;  // tiles == 0: the call has none
  int64_t capacity = 0;
  int64_t batches = 1, heads = 1, head_divisor = 1;
  Region entries, begin, places;
};

// Can entries hold the queries, and int32 the places of a head's lists?
bool fits_query_lists(const AttentionParams& p);
QueryListPlan plan_query_lists(const AttentionParams& p, int64_t& bytes);

// What a kernel wants of its lists.
struct KeyListOptions {
  bool keeps_live = false;   // for backward, whose blocks have tiles of live keys
  bool joins = false;        // for kernels that read one long list as fast as many short ones
  bool lengthens = false;    // for kernels that do not mind lists a sixteenth longer
  bool is_one = false;       // one list for all queries, in the order of launch_one_list
  bool by_lifetime = false;  // for backward, where keys may have any order
  int shortest = 0;          // segments have at least 2^shortest * kSegmentQueries queries
};

KeyLists plan_lists(const AttentionParams& p, const KeyListOptions& options);
KeyLists plan_ranges(const AttentionParams& p, int queries);
// The order in which kernels whose blocks have one tile each start them beside a block mask; a few tiles start all at once.
KeyLists plan_tile_order(const AttentionParams& p);

}  // namespace dmattn::cuda
