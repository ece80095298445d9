// The tile table of the sm90 family, one row per head size and variant: it changes speed, never results.
//
// The one surprise is the registers: 64K of them are shared by warpgroups of unequal appetite, so a row says how many a
// thread of each role gets, and the sum is checked here.
#pragma once

#include <initializer_list>

#include "../attention_launch.h"

namespace dmattn::cuda::sm90 {

// A block is four warpgroups: two that compute 64 rows of the tile each, one that loads, one that walks the keys.
inline constexpr int kConsumers = 2, kWarpgroup = 128, kThreads = (kConsumers + 2) * kWarpgroup;
inline constexpr int kLoaders = kWarpgroup / 2;  // threads that load keys; as many load values
inline constexpr int kRows = kConsumers * 64;    // of a tile: (query, head) pairs

struct ForwardShape {
  int keys;         // of a chunk
  int stages;       // chunks of keys, and of values, in flight
  int query_tiles;  // 2: the next tile's queries come while one is computed, and its output leaves from their place
  int notes;        // chunks that may be described ahead of their use
  int computing_registers, loading_registers, walking_registers;  // per thread
};

template <int kDim, Variant kVariant>
inline constexpr ForwardShape kForwardShape = {};
template <>
inline constexpr ForwardShape kForwardShape<64, Variant::kDense> = {192, 2, 2, 4, 216, 40, 40};
template <>
inline constexpr ForwardShape kForwardShape<128, Variant::kDense> = {160, 2, 2, 4, 216, 40, 40};
template <>
inline constexpr ForwardShape kForwardShape<64, Variant::kPlain> = {128, 2, 2, 8, 200, 40, 72};
template <>
inline constexpr ForwardShape kForwardShape<64, Variant::kGathered> = {128, 3, 2, 8, 192, 64, 64};
template <>
inline constexpr ForwardShape kForwardShape<64, Variant::kGeneral> = {64, 2, 2, 4, 184, 48, 96};
template <>
inline constexpr ForwardShape kForwardShape<128, Variant::kPlain> = {128, 2, 2, 8, 200, 40, 72};
template <>
inline constexpr ForwardShape kForwardShape<128, Variant::kGathered> = {128, 2, 2, 4, 200, 56, 56};
template <>
inline constexpr ForwardShape kForwardShape<128, Variant::kGeneral> = {64, 2, 2, 4, 192, 48, 80};
template <>
inline constexpr ForwardShape kForwardShape<256, Variant::kDense> = {80, 2, 1, 4, 216, 40, 40};
template <>
inline constexpr ForwardShape kForwardShape<256, Variant::kPlain> = {32, 4, 1, 4, 192, 48, 80};
template <>
inline constexpr ForwardShape kForwardShape<256, Variant::kGathered> = {64, 2, 1, 4, 208, 48, 48};
template <>
inline constexpr ForwardShape kForwardShape<256, Variant::kGeneral> = {32, 4, 1, 4, 200, 40, 72};

// Chunks have to fill the tiles of a block mask where there may be one, and a thread of the walk looks at one key. The walk holds
// a note back until the next is begun, and a chunk is computed beside the one before it: fewer notes or stages would wait for
// each other for ever.
constexpr bool is_valid(ForwardShape s, Variant variant) {
  for (const int registers : {s.computing_registers, s.loading_registers, s.walking_registers}) {
    if (registers % 8 != 0 || registers < 24 || registers > 256) return false;
  }
  const bool is_dense = variant == Variant::kDense, has_blocks = !is_dense && variant != Variant::kGathered;
  return s.keys % (is_dense ? 16 : 32) == 0 && s.keys <= (is_dense ? 256 : kWarpgroup) && (128 % s.keys == 0 || !has_blocks) &&
         s.stages >= 2 && s.notes >= 3 && (s.query_tiles == 1 || s.query_tiles == 2) &&
         (kConsumers * s.computing_registers + s.loading_registers + s.walking_registers) * kWarpgroup <= 65536;
}

// Backward: a block is two warpgroups that compute 64 keys of the tile each, and one that loads.
struct BackwardShape {
  int queries;                                 // of a chunk
  int query_stages;                            // chunks of queries in flight
  int computing_registers, loading_registers;  // per thread
};
inline constexpr int kBackwardKeys = kConsumers * 64, kBackwardThreads = (kConsumers + 1) * kWarpgroup;

template <int kDim>
inline constexpr BackwardShape kBackwardShape = {};
template <>
inline constexpr BackwardShape kBackwardShape<64> = {64, 3, 224, 56};
template <>
inline constexpr BackwardShape kBackwardShape<128> = {64, 2, 224, 56};

constexpr bool is_valid(BackwardShape s) {
  for (const int registers : {s.computing_registers, s.loading_registers}) {
    if (registers % 8 != 0 || registers < 24 || registers > 256) return false;
  }
  // At the start every thread has as many registers as divide evenly, in steps of 8.
  constexpr int kPool = 65536 / kBackwardThreads / 8 * 8 * kBackwardThreads;
  return s.queries == 64 && s.query_stages >= 2 &&
         (kConsumers * s.computing_registers + s.loading_registers) * kWarpgroup <= kPool;
}

}  // namespace dmattn::cuda::sm90
