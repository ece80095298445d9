// The shared memory of a block of the Hopper backward, and the barriers between its warps.
//
// A tile of keys stays for one tile visit: while all the queries that see it pass or, where live keys are gathered, those of one
// segment. A tile visit ends with a descriptor that brings no queries.
#pragma once

#include "../maps.h"
#include "../ring.cuh"
#include "../tile_descriptor.cuh"
#include "../work_tile.cuh"

namespace dmattn::cuda::sm90 {

// A tile of keys and the queries that see it.
struct KeyDescriptor {
  int batch, head, kv_head;  // head: the first of the head group; -1: the work is done, no tile visit begins
  int first_place;           // of the tile, among all keys or, where keys are gathered, in their list
  int from, to;              // the queries [from, to) of the tile visit
  // For each warp that loads keys: of its keys' spans the smallest and the largest first, the smallest and the largest last.
  int bounds[kLoaders / 32][4];
  alignas(16) int32_t index[kBackwardKeys];  // by index_place; -1 for none
  alignas(8) Seen span[kBackwardKeys];
  // Of the union of index lists: query q of the tile visit, counted from `from`, sees the key where bit q % 32 of word q / 32 is
  // set.
  alignas(16) uint32_t union_seen[kBackwardKeys][kBackwardUnionWords];
};

// A chunk of queries, or the end of a tile visit.
struct QueryDescriptor {
  const uint32_t* bits;  // those of the first query, from the tile's first key on; null: no bits have to be tested
  float* sums;           // of grad_query
  int first_query, head;
  bool ends_tile_visit;
  bool has_test;      // of spans, bits or both?
  bool needs_test;    // of spans?
  bool has_bad_rows;  // are there any in the call?
};

// A chunk of gathered queries, -1 for none, by index_place; and for each kListedKeys keys of the tile which of them list those:
// query q of the chunk where bit q % 32 of word q / 32 is set.
template <int kQueries>
struct ListedQueries {
  alignas(16) int32_t query[kQueries];
  alignas(8) uint32_t listed[kListedTileKeys / kListedKeys][kQueries / 32];
};

template <int kDim, bool kHasOptions>
struct alignas(1024) BackwardShared {
  static constexpr BackwardShape kShape = kBackwardShape<kDim, kHasOptions>;
  static_assert(kShape.keys == kBackwardKeys);
  static constexpr bool kSplitsChunks = false;  // query and grad_out of a chunk are announced together
  static constexpr int kPieces = 1;             // in which grad_query of a chunk is added
  static constexpr int kKeyDescriptors = 2;     // the next tile visit's queries are loaded before this tile visit has ended
  static constexpr int kQueryDescriptors = 8;   // a descriptor is read until the chunk after it has been computed
  static_assert(kQueryDescriptors > kShape.query_stages + 2);
  // The part of a chunk's grad_query that a warpgroup computes: half of its columns, or of its queries.
  static constexpr int kPartQueries = 64, kPartColumns = kDim * kShape.queries / (kConsumers * kPartQueries);
  uint16_t key[kBackwardKeys * kDim];
  uint16_t value[kBackwardKeys * kDim];
  uint16_t query[kShape.query_stages][kShape.queries * kDim];
  uint16_t grad_out[kShape.query_stages][kShape.queries * kDim];
  uint16_t grad_score[2][kBackwardKeys * kShape.queries];  // panels of 64 queries: keys by queries
  alignas(128) float lse2[kShape.query_stages][kShape.queries];
  alignas(128) float delta[kShape.query_stages][kShape.queries];
  alignas(128) uint32_t row_hash[kShape.query_stages][kShape.queries];  // with dropout
  KeyDescriptor key_descriptors[kKeyDescriptors];
  QueryDescriptor query_descriptors[kQueryDescriptors];
  ListedQueries<kShape.queries> listed[kQueryDescriptors];  // of Keys::kQueryLists
  uint32_t work_tile, query_tile_visit;                     // the work tile taken last; the tile visit whose queries are loaded
  int row_flags;                                            // a copy
  uint64_t descriptor_full[kKeyDescriptors], descriptor_empty[kKeyDescriptors];
  uint64_t key_full, value_full, tile_empty;
  uint64_t query_full[kShape.query_stages], query_empty[kShape.query_stages];
  uint64_t score_full[2], score_empty[2];
  uint64_t semaphore_acquired, semaphore_released;  // fixed order of sums: the computing warps may add; they have added
  uint64_t tile_visit_loaded;                       // all queries of a tile visit have been asked for
};

// Of the warps that load keys, of those that compute, of those that gather queries, and one for each computing warpgroup, whose
// turn it is; 0 is the whole block's.
inline constexpr int kLoadBarrier = 1, kClearBarrier = 2, kQueryBarrier = 3, kTurnBarrier = 4;

inline constexpr int kComputingThreads = kConsumers * kWarpgroup;

// Sets up the barriers between the warps that load and those that compute. By one thread.
template <class Shared>
__device__ __forceinline__ void init_barriers_of_loads(Shared& shared, bool has_semaphores, int query_loaders = 1) {
  for (int i = 0; i < Shared::kKeyDescriptors; ++i) {
    barrier_init(shared_address(&shared.descriptor_full[i]), kLoaders);
    barrier_init(shared_address(&shared.descriptor_empty[i]), kComputingThreads + (has_semaphores ? 2 : 1));
  }
  barrier_init(shared_address(&shared.semaphore_acquired), 1);
  barrier_init(shared_address(&shared.tile_visit_loaded), 1);
  barrier_init(shared_address(&shared.semaphore_released), kComputingThreads);
  barrier_init(shared_address(&shared.key_full), kLoaders);
  barrier_init(shared_address(&shared.value_full), kLoaders);
  barrier_init(shared_address(&shared.tile_empty), kComputingThreads);
  for (int i = 0; i < Shared::kShape.query_stages; ++i) {
    barrier_init(shared_address(&shared.query_full[i]), query_loaders);
    barrier_init(shared_address(&shared.query_empty[i]), kComputingThreads);
  }
}

}  // namespace dmattn::cuda::sm90
