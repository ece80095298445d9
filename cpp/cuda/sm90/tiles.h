// The tile table of the sm90 family, one row per head size and variant: it changes speed, never results.
//
// The one surprise is the registers: 64K of them are shared by four warpgroups of unequal appetite, so a row says how many a
// thread of each role gets, and the sum is checked here.
#pragma once

#include "../attention_launch.h"

namespace dmattn::cuda::sm90 {

// A block is four warpgroups: two that compute 64 rows of the tile each, one that loads, one that walks the keys.
inline constexpr int kConsumers = 2, kWarpgroup = 128, kThreads = (kConsumers + 2) * kWarpgroup;
inline constexpr int kRows = kConsumers * 64;  // of a tile: (query, head) pairs

struct ForwardShape {
  int keys;    // of a chunk
  int stages;  // chunks of keys, and of values, in flight
  int notes;   // chunks that may be described ahead of their use
};

template <int kDim, Variant kVariant>
inline constexpr ForwardShape kForwardShape = {};
template <Variant kVariant>
inline constexpr ForwardShape kForwardShape<64, kVariant> = {128, 2, 4};
template <>
inline constexpr ForwardShape kForwardShape<64, Variant::kGeneral> = {64, 2, 4};
template <Variant kVariant>
inline constexpr ForwardShape kForwardShape<128, kVariant> = {128, 2, 4};
template <>
inline constexpr ForwardShape kForwardShape<128, Variant::kGeneral> = {64, 2, 4};
template <Variant kVariant>
inline constexpr ForwardShape kForwardShape<256, kVariant> = {64, 2, 4};
template <>
inline constexpr ForwardShape kForwardShape<256, Variant::kGeneral> = {32, 2, 4};

inline constexpr int kConsumerRegisters = 200, kLoaderRegisters = 40, kWalkerRegisters = 72;
//static_assert((kConsumers * kConsumerRegisters + kLoaderRegisters + kWalkerRegisters) * kWarpgroup <= 65536);

static_assert((kConsumers * kConsumerRegisters + kLoaderRegisters + kWalkerRegisters) * kWarpgroup <= 65536);

}  // namespace dmattn::cuda::sm90
