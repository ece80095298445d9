// Hides scores of a chunk in the Hopper forward, as the chunk's descriptor says.
#pragma once

#include "../../ptx/wgmma.cuh"
#include "../tile_descriptor.cuh"

namespace dmattn::cuda::sm90 {

// Scores that the descriptor hides become -inf. Unions have SeenBits instead. positions and queries are those of the thread's two
// rows. last_key: of the call, for instances whose chunks may reach beyond it.
template <int kN, class Descriptor>
__device__ __forceinline__ void hide(float (&scores)[kN][4], const Descriptor& descriptor, uint32_t flags, bool is_causal,
                                     int last_key, int column, const int (&positions)[2], const int (&queries)[2]) {
  auto keep = [&](int i, int r, bool left, bool right) {
    if (!left) scores[i][2 * r] = negative_infinity();
    if (!right) scores[i][2 * r + 1] = negative_infinity();
  };
  if ((Descriptor::kIsDense && !Descriptor::kHasIntervals) || flags & kLimit) {
    const int base = descriptor.first_key + column;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int last = is_causal ? positions[r] : last_key;
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const int key = base + 8 * i;
        keep(i, r, key >= 0 && key <= last, key + 1 >= 0 && key + 1 <= last);
      }
    }
  } else if (flags & (kSpans | kFew)) {
    if constexpr (Descriptor::kIsGathered) {
      const int warp = static_cast<int>(threadIdx.x) / 32, lane = read_lane();
      const uint4* const seen = reinterpret_cast<const uint4*>(&descriptor.seen[warp][Descriptor::seen_place(lane % 4 * 2)]);
      const uint32_t row = 1u << (lane / 4);  // the row 8 further on is 8 bits further on, the next column 16
#pragma unroll
      for (int i = 0; i < kN; i += 4) {
        if (i == kFewRows / 8 && !(flags & kSpans)) break;
        const uint4 four = seen[i / 4];
        const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int r = 0; r < 2; ++r) keep(i + j, r, words[j] & (row << (8 * r)), words[j] & (row << (16 + 8 * r)));
        }
        asm volatile("" ::: "memory");  // not all loads at once: registers are short here
      }
    } else if (Descriptor::kHasIntervals && !(flags & kStarts)) {
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const int2 last = *reinterpret_cast<const int2*>(&descriptor.last[column + 8 * i]);
#pragma unroll
        for (int r = 0; r < 2; ++r) keep(i, r, positions[r] < last.x, positions[r] < last.y);
        if (i % 4 == 3) asm volatile("" ::: "memory");
      }
    } else {
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const int4 spans = *reinterpret_cast<const int4*>(&descriptor.span[column + 8 * i]);
        const Seen left{spans.x, static_cast<uint32_t>(spans.y)}, right{spans.z, static_cast<uint32_t>(spans.w)};
#pragma unroll
        for (int r = 0; r < 2; ++r) keep(i, r, left.sees(positions[r]), right.sees(positions[r]));
        if (i % 4 == 3) asm volatile("" ::: "memory");
      }
    }
  } else if constexpr (Descriptor::kHasBits) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int w = 0; w < kN / 4; ++w) {
        const uint32_t bits = descriptor.bits[queries[r]][w] >> column;
#pragma unroll
        for (int i = 0; i < 4; ++i) keep(4 * w + i, r, has_bit(bits, 8 * i), has_bit(bits, 8 * i + 1));
        asm volatile("" ::: "memory");
      }
    }
  }
  if constexpr (Descriptor::kIsGathered) {
    if (flags & kGaps) {
      const int rows_present = descriptor.rows_present - column;
#pragma unroll
      for (int i = 0; i < kN; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) keep(i, r, 8 * i < rows_present, 8 * i + 1 < rows_present);
      }
    }
  }
}

}  // namespace dmattn::cuda::sm90
