// The scheduler for index lists: reads the union of a tile (key_lists/key_unions.h) and makes chunks of it.
#pragma once

#include <type_traits>

#include "scheduler.cuh"

namespace dmattn::cuda::sm90 {

// Transposes matrices of 32 x 32 bits, a word of each in each lane: bit l of lane q was bit q of lane l.
template <int kWords>
__device__ __forceinline__ void transpose_bits(uint32_t (&words)[kWords]) {
  const uint32_t lane = read_lane();
#pragma unroll
  for (uint32_t step = 16; step > 0; step /= 2) {
    // A lane keeps half of its bits, and takes those that its partner does not keep.
    const bool is_upper = lane & step;
    const uint32_t bytes = step == 16 ? (is_upper ? 0x3276 : 0x5410) : (is_upper ? 0x3715 : 0x6240);
    const uint32_t low = step == 4 ? 0x0f0f0f0fu : step == 2 ? 0x33333333u : 0x55555555u, kept = is_upper ? ~low : low;
#pragma unroll
    for (uint32_t& word : words) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, word, step);
      const uint32_t moved = __funnelshift_l(other, other, is_upper ? 32 - step : step);
      word = step >= 8 ? __byte_perm(word, other, bytes) : (word & kept) | (moved & ~kept);
    }
  }
}

template <int kDim, class Traits>
__device__ __forceinline__ void Scheduler<kDim, Traits>::schedule_union() {
  // A key has words of bits, of 32 queries each. Where there are more threads than keys, kShares of them have a key, and each has
  // every kShares-th word.
  constexpr int kShares = kThreads > kKeys ? kThreads / kKeys : 1, kWords = kRows / 32 / kShares;
  static_assert(kRows / 32 % kShares == 0 && kRows / 16 <= kSeenBit);
  const KeyUnions& unions = call_.live_keys.unions;
  const int64_t list = unions.list_of(batch_, head_, first_query_);
  const int32_t* const keys = unions.key + list * unions.capacity;
  const uint32_t* const bits = unions.seen_of(list);
  const int count = unions.count[list], shift = work_.log2_heads_per_tile;
  int key[kRowsPerThread];
  uint32_t seen[kRowsPerThread][kWords];
  const auto row_of_chunk = [&](int i) { return kShares > 1 ? thread_ % kKeys : thread_ + i * kThreads; };
  const auto number_of = [&](int word) { return word * kShares + (kShares > 1 ? thread_ / kKeys : 0); };
  // Reads what a chunk needs, a chunk ahead, so that the latency is hidden.
  const auto read = [&](int begin) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int at = begin + row_of_chunk(i);
      const bool is_key = row_of_chunk(i) < kKeys && at < count;
      // Missing rows repeat the last key: another key might hold NaN, and 0 times NaN is NaN.
      key[i] = count > 0 ? keys[min(at, count - 1)] : 0;
#pragma unroll
      for (int word = 0; word < kWords; ++word) {
        seen[i][word] = is_key && number_of(word) < unions.words ? bits[number_of(word) * unions.capacity + at] : 0;
      }
    }
  };
  read(0);
  for (int begin = 0; begin == 0 || begin < count; begin += kKeys) {
    Descriptor& descriptor = begin_chunk();
    if (thread_ == 0) descriptor.rows_present = count > 0 ? kKeys : 0;
    int lane = read_lane();
    asm volatile("" : "+r"(lane));  // so that what follows from it is computed here, not kept: registers are short
    // The bits of a key's queries become bits of a query's keys.
    uint32_t see_all[kWords], see_some[kWords];  // a bit for each query: does it see all of this warp's keys, or some of them?
#pragma unroll
    for (int word = 0; word < kWords; ++word) see_all[word] = 0xffffffffu, see_some[word] = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = row_of_chunk(i);
      if (row - lane >= kKeys) break;
      const auto describe = [&](auto words) {
        uint32_t (&of_row)[words.value] = reinterpret_cast<uint32_t (&)[words.value]>(seen[i]);
        transpose_bits(of_row);
#pragma unroll
        for (int word = 0; word < words.value; ++word) {
          descriptor.bits[32 * number_of(word) + lane][row / 32] = of_row[word];
          see_all[word] &= __ballot_sync(0xffffffffu, of_row[word] == 0xffffffffu);
          see_some[word] |= __ballot_sync(0xffffffffu, of_row[word] != 0);
        }
      };
      constexpr int kFewWords = kWords < 2 ? kWords : 2;
      if (unions.words <= kFewWords * kShares) {
        describe(std::integral_constant<int, kFewWords>());
      } else {
        describe(std::integral_constant<int, kWords>());
      }
    }
    // Each of the first kRows / 16 lanes looks whether the queries of a computing warp see all keys, and whether they see any.
    const int first_query = (16 * lane) >> shift, queries_of_warp = max(16 >> shift, 1);
    const uint32_t queries = ((2u << (queries_of_warp - 1)) - 1) << first_query % 32;
    bool is_tested = false, sees = false;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      if (lane < kRows / 16 && first_query / 32 == number_of(word)) {
        is_tested = (see_all[word] & queries) != queries, sees = see_some[word] & queries;
      }
    }
    uint32_t mine = __ballot_sync(0xffffffffu, is_tested);
    const uint32_t seeing = __ballot_sync(0xffffffffu, sees);
#pragma unroll
    for (int group = 0; group < kRows / 64; ++group) mine |= (seeing >> 4 * group & 15 ? 1u : 0u) << (kSeenBit + group);
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = row_of_chunk(i);
      if (thread_ + i * kThreads >= kKeys) break;
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
