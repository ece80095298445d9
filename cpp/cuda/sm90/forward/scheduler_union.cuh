// The scheduler for index lists: reads the union of a tile (key_lists/key_unions.h) and makes chunks of it.
#pragma once

#include "scheduler.cuh"

namespace dmattn::cuda::sm90 {

// The lowest bits of `bits`, one for each query, as bits of 16 rows, of which each query has 2^kShift.
template <int kShift>
__device__ __forceinline__ uint32_t rows_of_queries(uint32_t bits) {
  if constexpr (kShift == 0) return bits & 0xffffu;
  if constexpr (kShift == 1) {
    bits &= 0xffu;
    bits = (bits | bits << 4) & 0x0f0fu;
    bits = (bits | bits << 2) & 0x3333u;
    return ((bits | bits << 1) & 0x5555u) * 3;
  }
  if constexpr (kShift == 2) {
    bits &= 0xfu;
    bits = (bits | bits << 6) & 0x0303u;
    return ((bits | bits << 3) & 0x1111u) * 15;
  }
  if constexpr (kShift == 3) return (bits & 1) * 0xffu | (bits & 2) * 0x7f80u;
  return (bits & 1) * 0xffffu;
}

// Writes into the descriptor which rows of the tile see the key of a row of the chunk. Returns a bit for each computing warp of
// which some row does not, and bits from kSeenBit on for the warpgroups of which some row does. seen: bits of the tile's queries,
// of which each has 2^shift rows; kShift is shift, at most 4.
template <int kShift, class Descriptor, int kWords>
__device__ __forceinline__ uint32_t describe_union(Descriptor& descriptor, int row, const uint32_t (&seen)[kWords], int shift) {
  uint32_t tested = 0;
#pragma unroll
  for (int warp = 0; warp < Descriptor::kRows / 16; ++warp) {
    // From 16 heads on a warp has rows of one query alone, and all queries are in the first word.
    const int query = kShift < 4 ? warp * 16 >> kShift : warp * 16 >> shift;
    const uint32_t rows = rows_of_queries<kShift>(seen[kShift < 4 ? (warp * 16 >> kShift) / 32 : 0] >> query % 32);
    descriptor.seen[warp][Descriptor::seen_place(row)] = static_cast<uint16_t>(rows);
    if (rows != 0xffffu) tested |= 1u << warp;
    if (rows != 0) tested |= 1u << (kSeenBit + warp / 4);
  }
  return tested;
}

template <int kDim, class Traits>
__device__ __forceinline__ void Scheduler<kDim, Traits>::schedule_union() {
  constexpr int kWords = kRows / 32;  // at most, when each query has one row
  const KeyUnions& unions = call_.live_keys.unions;
  const int64_t list = unions.list_of(batch_, head_, first_query_);
  const int32_t* const keys = unions.key + list * unions.capacity;
  const uint32_t* const bits = unions.seen_of(list);
  const int count = unions.count[list], shift = work_.log2_heads_per_tile;
  int key[kRowsPerThread];
  uint32_t seen[kRowsPerThread][kWords];
  // Reads what a chunk needs, a chunk ahead, so that the latency is hidden.
  const auto read = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int at = begin + thread_ + i * kThreads;
      const bool is_key = thread_ + i * kThreads < kKeys && at < count;
      key[i] = is_key ? keys[at] : 0;
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        seen[i][word] = is_key && word < unions.words ? bits[word * unions.capacity + at] : 0;
      }
    }
  };
  read(0);
  for (int begin = 0; begin < count; begin += kKeys) {
    Descriptor& descriptor = begin_chunk();
    if (thread_ == 0) descriptor.rows_present = min(kKeys, count - begin);
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = thread_ + i * kThreads;
      if (row >= kKeys) break;
      switch (shift) {
        case 0: mine |= describe_union<0>(descriptor, row, seen[i], shift); break;
        case 1: mine |= describe_union<1>(descriptor, row, seen[i], shift); break;
        case 2: mine |= describe_union<2>(descriptor, row, seen[i], shift); break;
        case 3: mine |= describe_union<3>(descriptor, row, seen[i], shift); break;
        default: mine |= describe_union<4>(descriptor, row, seen[i], shift);
      }
      descriptor.index[index_place<kKeys>(row)] = key[i];
      describe_hash(descriptor, row, key[i]);
    }
    const bool is_last = begin + kKeys >= count;
    if (!is_last) read(begin + kKeys);
    const uint32_t tested = reduce_tested(mine);
    accept((tested & (kSeenByFirst - kTested) ? kSpans : 0) | tested);
    if (!is_last) publish(0);
  }
}

}  // namespace dmattn::cuda::sm90
