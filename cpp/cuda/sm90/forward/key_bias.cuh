// key_bias as a product of its own, in forward where keys are in order: scores = ones [rows, 16] thirds [keys, 16]^T + Q K^T.
//
// Elsewhere every computing thread reads the key_bias of all columns into its scores before products may begin. Here one step of
// 16 before those of Q K^T overwrites the scores with it. A float has 24 digits and a bfloat16 has 8, so key_bias / scale is the
// sum of three bfloat16, its thirds. They are columns 0 to 2 of a row of `thirds`, and `ones` has 1 there; all else is 0. Calls
// of float16 have bfloat16 here, too, because that has the range of floats, and -inf for keys that are hidden.
//
// Tensor cores were seen to align what they add in a step with 24 digits or more, so the sum is exact. Warps that load keys write
// their thirds next to them. In chunks with a key_bias beyond kHugeBias these are zeros, and computing threads add it afterwards.
#pragma once

#include "../../ptx/mbarrier.cuh"
#include "../../ptx/wgmma.cuh"
#include "../tiles.h"

namespace dmattn::cuda::sm90 {

// Do instances have this product?
template <class Traits>
inline constexpr bool kMultipliesBias = Traits::kBias == Bias::kKey && !Traits::kGathers;

// Three bfloat16 that add up to x, the largest first, in the halves of two words. Digits are cut off, not rounded, so a large
// finite x does not become infinite. What is infinite or NaN has zeros for its other thirds.
__device__ __forceinline__ uint2 split_in_thirds(float x) {
  const auto cut = [](float from) { return __uint_as_float(__float_as_uint(from) & 0xffff0000u); };
  const float first = cut(x), rest = fabsf(x) < -negative_infinity() ? x - first : 0.0f, second = cut(rest);
  constexpr int kUpperHalves = 0x7632;
  return {__byte_perm(__float_as_uint(first), __float_as_uint(second), kUpperHalves), __float_as_uint(rest - second) >> 16};
}

// The operands in shared memory, narrow tiles both (wgmma.cuh).
template <int kDim, class Traits>
struct BiasOperands {
  static constexpr bool kExists = kMultipliesBias<Traits>;
  static constexpr int kStages = kExists ? kForwardShape<kDim, Traits>.stages : 1;
  static constexpr int kStageBytes = kExists ? kForwardShape<kDim, Traits>.keys * kNarrowRowBytes : 2;
  static constexpr int kOnesBytes = kExists ? 64 * kNarrowRowBytes : 2;
  static_assert(!kExists || kStageBytes % 256 == 0);
  alignas(kExists ? 256 : 2) uint8_t thirds[kStages][kStageBytes];
  uint8_t ones[kOnesBytes];  // 64 rows: all warpgroups read the same

  // Writes `ones`, and zeros for thirds, of which only the first three columns are written later. Called by all threads of a
  // block.
  __device__ __forceinline__ void set_up() {
    if constexpr (kExists) {
      constexpr uint32_t kOne = 0x3f80;
      constexpr int kThirdsPieces = kStages * kStageBytes / 16;
      uint4* const pieces = reinterpret_cast<uint4*>(this);
      for (int i = static_cast<int>(threadIdx.x); i < kThirdsPieces + kOnesBytes / 16; i += static_cast<int>(blockDim.x)) {
        const int of_ones = i - kThirdsPieces;
        const bool is_first = of_ones >= 0 && of_ones * 16 == narrow_place(of_ones / 2, 0);  // of its row
        pieces[i] = {is_first ? kOne << 16 | kOne : 0, is_first ? kOne : 0, 0, 0};
      }
      fence_async();
    }
  }

  // Writes the thirds of a key of a chunk: x is its key_bias / scale. To be fenced before the chunk is announced.
  __device__ __forceinline__ void write(int stage, int row, float x) {
    if constexpr (kExists) *reinterpret_cast<uint2*>(&thirds[stage][narrow_place(row, 0)]) = split_in_thirds(x);
  }
};

}  // namespace dmattn::cuda::sm90
