// The scheduler for index lists: reads the union of a tile (key_lists/key_unions.h) and makes chunks of it.
#pragma once

#include "scheduler.cuh"

namespace dmattn::cuda::sm90 {

// Bits of queries, from bit 0 on, as bits of 16 rows, of which each query has 2^shift.
__device__ __forceinline__ uint32_t rows_of_queries(uint32_t bits, int shift) {
  switch (shift) {
    case 0: return bits & 0xffffu;
    case 1:
      bits &= 0xffu;
      bits = (bits | bits << 4) & 0x0f0fu;
      bits = (bits | bits << 2) & 0x3333u;
      return ((bits | bits << 1) & 0x5555u) * 3;
    case 2: bits = (bits & 0xfu) * 0x41u & 0x0303u; return (bits * 9 & 0x1111u) * 15;
    case 3: return (bits & 1) * 0xffu | (bits & 2) * 0x7f80u;
    default: return (bits & 1) * 0xffffu;
  }
}

template <int kDim, class Traits>
__device__ __forceinline__ void Scheduler<kDim, Traits>::schedule_union() {
  const KeyUnions& unions = call_.live_keys.unions;
  const int64_t list = unions.list_of(batch_, head_, first_query_);
  const int32_t* const keys = unions.key + list * unions.capacity;
  const uint32_t* const bits = unions.seen + list * unions.capacity * unions.words;
  const int count = unions.count[list], shift = work_.log2_heads_per_tile;
  for (int begin = 0; begin < count; begin += kKeys) {
    const int taken = min(kKeys, count - begin);
    int key[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = thread_ + i * kThreads;
      key[i] = row < taken ? keys[begin + row] : 0;
    }
    Descriptor& descriptor = begin_chunk();
    if (thread_ == 0) descriptor.rows_present = taken;
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = thread_ + i * kThreads;
      if (row >= kKeys) break;
      const uint32_t* const of_key = bits + static_cast<int64_t>(begin + row) * unions.words;
#pragma unroll
      for (int group = 0; group < kRows / 16; ++group) {  // 16 rows of the tile, those of a computing warp
        const int query = group * 16 >> shift;
        const uint32_t rows = row < taken ? rows_of_queries(of_key[query / 32] >> query % 32, shift) : 0;
        descriptor.seen[group][Descriptor::seen_place(row)] = static_cast<uint16_t>(rows);
        if (rows != 0xffffu) mine |= 1u << group;
      }
      descriptor.index[index_place<kKeys>(row)] = key[i];
      describe_hash(descriptor, row, key[i]);
    }
    const uint32_t tested = reduce_tested(mine);
    accept(tested ? kSpans | tested : 0);
    if (begin + kKeys < count) publish(0);
  }
}

}  // namespace dmattn::cuda::sm90
