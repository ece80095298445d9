// The shared memory of a block of the Hopper forward, and the barriers between its warps.
#pragma once

#include "../ring.cuh"
#include "../tile_descriptor.cuh"
#include "../work_tile.cuh"
#include "key_bias.cuh"

namespace dmattn::cuda::sm90 {

// What the scheduler keeps in shared memory. Instances that never gather have no lists, and so no queues.
template <int kDim, class Traits>
struct SchedulerQueues {
  static constexpr int kThreads = kForwardShape<kDim, Traits>.scheduler_threads(), kWarps = kThreads / 32;
  static constexpr bool kHasLists = Traits::kMayGather;
  static constexpr int kRing = kHasLists ? 1024 : 1;
  // The place of the n-th entry of a queue, n >= 0; a remainder of signed numbers would be four instructions.
  static __device__ __forceinline__ int place(int n) { return n & (kRing - 1); }
  int32_t whole[kRing];    // keys that every query of the tile sees
  int32_t partial[kRing];  // places in the list of keys that some see
  // Aligned, so that a buffer is read without words beside it, which another warp may be writing.
  alignas(16) int warp_counts[2][kWarps];
  alignas(16) uint32_t warp_flags[2][kWarps];
  uint32_t some_see[kWarps][4];  // of the queries of each warp: which keys of a chunk does one see? A bit for each key
  uint32_t work_tile;            // the next one
  // With a block mask: some entries of its row of tiles, and their states.
  static constexpr bool kHasEntries = Traits::kTakesBlocks;
  int32_t entries[kHasEntries ? kThreads : 1], states[kHasEntries ? kThreads : 1];
  // With a block mask, for each thread: which of its tiles are short, and how many tiles of the threads before it are.
  // short_tiles: how many of all; 0: tiles are taken in the order of their numbers.
  static constexpr bool kHasOrder = Traits::kKeys == Keys::kInOrder;
  uint32_t is_short[kHasOrder ? kThreads : 1];
  uint16_t short_before[kHasOrder ? kThreads : 1];
  int short_tiles;
};

// A tile whose queries are in shared memory.
struct QueryTileDescriptor {
  int batch, head, first_query;
};

template <int kDim, class Traits>
struct alignas(1024) ForwardShared {
  static constexpr ForwardShape kShape = kForwardShape<kDim, Traits>;
  static constexpr int kRows = kShape.rows();
  static constexpr bool kByCopy = kShape.query_tiles > 1;  // the output leaves by tensor copies, from the place of the queries
  static constexpr int kQueryTileDescriptors = 4;  // the output of a tile is written while its second successor may be loading
  static_assert(kQueryTileDescriptors >= kShape.query_tiles + 2);
  uint16_t query[kShape.query_tiles][kRows * kDim];
  uint16_t key[kShape.stages][kShape.keys * kDim];
  uint16_t value[kShape.stages][kShape.keys * kDim];
  TileDescriptor<kDim, Traits> descriptors[kShape.descriptors];
  QueryTileDescriptor tiles[kQueryTileDescriptors];
  uint32_t row_hash[Traits::kMayDrop ? kRows : 1];  // with dropout: dropout_row_hash of each row of the tile at hand
  SchedulerQueues<kDim, Traits> queues;
  uint64_t query_full[kShape.query_tiles], query_empty[kShape.query_tiles];
  uint64_t key_full[kShape.stages], key_empty[kShape.stages];
  uint64_t value_full[kShape.stages], value_empty[kShape.stages];
  uint64_t descriptor_full[kShape.descriptors], descriptor_empty[kShape.descriptors];
  uint64_t landed[2]
                 [Traits::kKeys == Keys::kIntervals ? kShape.stages : 1];  // keys, and values, of a chunk of which some are dead
  // The bias of chunks, in panels of kBiasColumns: 64 bytes for a row, and 16-byte piece c of row r at piece c ^ (r / 2 % 4).
  static constexpr int kBiasStages = Traits::kBias == Bias::kCopied ? kShape.stages : 1;
  uint64_t bias_full[kBiasStages], bias_empty[kBiasStages];
  alignas(Traits::kBias == Bias::kCopied
              ? 1024
              : 2) uint16_t bias[kBiasStages][Traits::kBias == Bias::kCopied ? kRows * kShape.keys : 1];
  BiasOperands<kDim, Traits> bias_operands;
};

}  // namespace dmattn::cuda::sm90
