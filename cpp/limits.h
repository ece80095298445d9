// The largest sizes and factors that calls may have.
#pragma once

#include <cstdint>

namespace dmattn {

inline constexpr int64_t kMaxLength = int64_t{1} << 20;
inline constexpr int64_t kMaxLengthInOrder = int64_t{1} << 27;  // on a GPU, of keys in order that need no lists
inline constexpr int64_t kMaxHeadDim = 256;
inline constexpr int64_t kMaxTile = 4096;  // of a block mask
inline constexpr int64_t kMaxIndexBlock = 128;
inline constexpr double kMaxFactor = 1e30;  // of scale and softcap: products with it stay finite in float32

}  // namespace dmattn
