// The bits of index lists' unions that say which queries see which keys, as a thread of a product needs them.
#pragma once

#include "../common/device.cuh"

namespace dmattn::cuda::sm90 {

// A bit for each of a thread's scores [kN tiles of 8 columns][2 rows x 2 columns], in few registers, so that they can be read
// while a product is under way.
template <int kN>
struct SeenBits {
  static constexpr int kWords = kN / 4;
  // Of two words each: byte b has two bits for the columns of tile b of the first word's first row, then of its second row, then
  // the same of the second word.
  uint32_t bits[(kN + 7) / 8];

  SeenBits() = default;
  // first, second: bits by column for the thread's two rows; column: its first.
  __device__ __forceinline__ SeenBits(const uint32_t (&first)[kWords], const uint32_t (&second)[kWords], int column) {
#pragma unroll
    for (uint32_t& of_words : bits) of_words = 0;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      constexpr uint32_t kColumns = 0x03030303u;
      const uint32_t pair = (first[word] >> column & kColumns) | (second[word] >> column & kColumns) << 2;
      bits[word / 2] |= pair << word % 2 * 4;
    }
#pragma unroll
    for (uint32_t& of_words : bits)
      asm volatile("" : "+r"(of_words));  // otherwise the compiler keeps the words, in more registers
  }
  // Scores that are not seen become -inf.
  __device__ __forceinline__ void hide(float (&scores)[kN][4]) const {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!(bits[i / 8] & 1u << (i % 4 * 8 + i / 4 % 2 * 4 + e))) scores[i][e] = negative_infinity();
      }
    }
  }
};

}  // namespace dmattn::cuda::sm90
