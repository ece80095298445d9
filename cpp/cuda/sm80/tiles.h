// The tile table of the sm80 family, one row per kernel and head size: it changes speed, never results.
//
// The one surprise is 99 KB: GPUs other than A100, H100 and B200 offer a block no more shared memory, so rows that need more have
// a smaller sibling that runs there.
#pragma once

#include "../calls.h"

namespace dmattn::cuda::sm80 {

struct ForwardShape {
  int queries, keys, warps, blocks_per_sm;
};

// queries, keys, warps, blocks_per_sm. The general variant holds more per element, so it takes fewer keys at a time.
template <int kDim, Variant kVariant>
inline constexpr ForwardShape kForwardShape = {};
template <Variant kVariant>
inline constexpr ForwardShape kForwardShape<64, kVariant> = {128, 64, 4, 2};
template <>
inline constexpr ForwardShape kForwardShape<64, Variant::kPlain> = {128, 128, 4, 2};
template <>
inline constexpr ForwardShape kForwardShape<64, Variant::kGeneral> = {128, 32, 4, 2};
template <Variant kVariant>
inline constexpr ForwardShape kForwardShape<128, kVariant> = {128, 64, 4, 2};
template <>
inline constexpr ForwardShape kForwardShape<128, Variant::kGeneral> = {128, 32, 4, 2};
template <Variant kVariant>
inline constexpr ForwardShape kForwardShape<256, kVariant> = {64, 32, 4, 1};

constexpr bool is_valid(ForwardShape s) {
  return s.queries % (16 * s.warps) == 0 && s.keys % 32 == 0 && 128 % s.keys == 0 && 128 % s.queries == 0 &&
         s.keys <= s.warps * 32;
}
template <Variant kVariant>
inline constexpr bool kForwardIsValid =
    is_valid(kForwardShape<64, kVariant>) && is_valid(kForwardShape<128, kVariant>) && is_valid(kForwardShape<256, kVariant>);
static_assert(kForwardIsValid<Variant::kPlain> && kForwardIsValid<Variant::kGathered> && kForwardIsValid<Variant::kGeneral>);

// Backward: `queries` by `keys` scores at a time, held by warps in a grid of `warp_rows` rows. The query-major kernel keeps its
// queries and walks the keys, the key-major kernel the other way round. Of what it walks it reads one tile early (values,
// grad_out) and one late (keys, queries); each has room for as many chunks as it has stages.
struct BackwardShape {
  int queries, keys, warps, warp_rows, early_stages, late_stages, blocks_per_sm;
};

enum class Room : int32_t { kLarge, kSmall };  // shared memory: 160 KB and more (sm80, sm90, sm100), 99 KB

// queries, keys, warps, warp_rows, early_stages, late_stages, blocks_per_sm
template <int kDim, Room kRoom>
inline constexpr BackwardShape kQueryMajorShape = {};
template <Room kRoom>
inline constexpr BackwardShape kQueryMajorShape<64, kRoom> = {128, 64, 8, 4, 1, 1, 1};
template <>
inline constexpr BackwardShape kQueryMajorShape<128, Room::kLarge> = {128, 64, 8, 4, 1, 2, 1};
template <>
inline constexpr BackwardShape kQueryMajorShape<128, Room::kSmall> = {64, 64, 8, 4, 1, 1, 1};
template <>
inline constexpr BackwardShape kQueryMajorShape<256, Room::kLarge> = {64, 32, 8, 4, 1, 1, 1};
template <>
inline constexpr BackwardShape kQueryMajorShape<256, Room::kSmall> = {32, 32, 4, 2, 1, 1, 1};

// queries, keys, warps, warp_rows, early_stages, late_stages, blocks_per_sm
template <int kDim, Room kRoom>
inline constexpr BackwardShape kKeyMajorShape = {};
template <>
inline constexpr BackwardShape kKeyMajorShape<64, Room::kLarge> = {128, 128, 8, 4, 2, 2, 1};
template <>
inline constexpr BackwardShape kKeyMajorShape<64, Room::kSmall> = {64, 128, 8, 2, 1, 2, 1};
template <>
inline constexpr BackwardShape kKeyMajorShape<128, Room::kLarge> = {64, 128, 8, 2, 2, 2, 1};
template <>
inline constexpr BackwardShape kKeyMajorShape<128, Room::kSmall> = {64, 64, 8, 2, 1, 1, 1};
template <>
inline constexpr BackwardShape kKeyMajorShape<256, Room::kLarge> = {32, 64, 8, 2, 1, 1, 1};
template <>
inline constexpr BackwardShape kKeyMajorShape<256, Room::kSmall> = {32, 32, 4, 2, 1, 1, 1};

constexpr bool is_valid(BackwardShape s) {
  const int columns = s.warps / s.warp_rows;
  return s.warps % s.warp_rows == 0 && s.queries % (16 * s.warp_rows) == 0 && s.keys % (16 * columns) == 0 && 128 % s.keys == 0 &&
         128 % s.queries == 0 && s.keys % 32 == 0 && s.queries % 32 == 0 && s.warps % (s.keys / 32) == 0 &&
         s.keys <= s.warps * 32 && s.queries <= s.warps * 32;
}
static_assert(is_valid(kQueryMajorShape<64, Room::kLarge>) && is_valid(kQueryMajorShape<128, Room::kLarge>) &&
              is_valid(kQueryMajorShape<128, Room::kSmall>) && is_valid(kQueryMajorShape<256, Room::kLarge>) &&
              is_valid(kQueryMajorShape<256, Room::kSmall>));
static_assert(is_valid(kKeyMajorShape<64, Room::kLarge>) && is_valid(kKeyMajorShape<64, Room::kSmall>) &&
              is_valid(kKeyMajorShape<128, Room::kLarge>) && is_valid(kKeyMajorShape<128, Room::kSmall>) &&
              is_valid(kKeyMajorShape<256, Room::kLarge>) && is_valid(kKeyMajorShape<256, Room::kSmall>));

}  // namespace dmattn::cuda::sm80
