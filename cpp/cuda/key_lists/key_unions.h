// The keys of a tile of queries whose mask lists keys for each query: the union of the lists, and which of the queries see each
// key. Plain C++, no CUDA.
//
// Neighbouring queries list many of the same keys. A tile of them gathers each of those keys once, and a bit says for each pair
// whether the query sees the key. Everything else that hides pairs (causality, intervals, a block mask) is in the bits, too, so
// kernels that read unions test nothing but them.
#pragma once

#include <cstdint>

#include "../../params.h"

namespace dmattn::cuda {

inline constexpr int kMostUnionQueries = 192;  // of a tile
inline constexpr int kMostUnionWords = kMostUnionQueries / 32;
inline constexpr int kMostUnionGroups = 3;  // into which the queries of a tile are divided

// One list for each tile of `queries` neighbouring queries of a mask head, of `tiles` tiles at a time: as many as the workspace
// has room for. There are as many mask heads as the masks of a call together tell apart.
//
// Keys ascend, or where a tile has groups of queries that are computed apart, they are sorted by the groups that see them: most
// chunks of `chunk` keys are then seen by the same groups throughout, and the others leave them out. Chunks that equally many
// groups see take turns, so that all groups have work.
struct KeyUnions {
  int32_t* key = nullptr;    // [mask heads, tiles, capacity]; null: the call has no index lists
  uint32_t* seen = nullptr;  // [mask heads, tiles, words, capacity]: query q of the tile sees the key where bit q is set
  int32_t* count = nullptr;  // [mask heads, tiles]
  int queries = 0, words = 0;
  int groups = 1, chunk = 0;  // groups of as many neighbouring queries each; keys of a chunk
  int first_tile = 0, tiles = 0;
  int64_t capacity = 0;
  int64_t batch_stride = 0;  // 0 or heads, counted in mask heads
  int64_t batches = 1, heads = 1, head_divisor = 1;

  DMATTN_HOST_DEVICE int64_t list_of(int batch, int head, int first_query) const {
    const int64_t mask_head = batch * batch_stride + head / static_cast<int>(head_divisor);
    return mask_head * tiles + (first_query / queries - first_tile);
  }
  // Where the words of bits of list number `list` begin; from one word of a key to its next are `capacity`.
  DMATTN_HOST_DEVICE uint32_t* seen_of(int64_t list) const { return seen + list * capacity * words; }
};

}  // namespace dmattn::cuda
