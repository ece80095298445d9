// What the scheduler writes into a descriptor for single keys: key_bias, dropout's hashes, and which rows see them.
#pragma once

#include "scheduler.cuh"

namespace dmattn::cuda::sm90 {

// The key_bias of a row, beside a bias of pairs.
template <int kDim, class Traits>
__device__ __forceinline__ void Scheduler<kDim, Traits>::describe_bias(Descriptor& descriptor, int row, int key) const {
  if (Traits::kBias != Bias::kPair) return;
  descriptor.key_bias[Descriptor::bias_place(row)] = key_bias_ && key >= 0 ? key_bias_[key] : 0.0f;
}

// Brings the bias of pairs of a chunk from memory into L2. A thread takes a row of the tile.
template <int kDim, class Traits>
__device__ __forceinline__ void Scheduler<kDim, Traits>::fetch_bias(int first_key) const {
  const AttentionParams& p = call_.p;
  if (Traits::kBias != Bias::kPair || !p.bias.data) return;
  int row = thread_;
  asm volatile("" : "+r"(row));  // so that what follows from it is computed here, not kept: registers are short
  const int query = first_query_ + work_.query_of_row(row);
  if (row >= kRows || query >= p.query_length || first_key < 0) return;
  const int shift = p.bias_dtype == DType::kFloat32 ? 2 : 1;
  const char* const from = static_cast<const char*>(p.bias.data) +
                           ((batch_ * p.bias.batch_stride +
                             (head_ + work_.head_of_row(row)) / static_cast<int>(p.bias.head_divisor) * p.bias.head_stride +
                             query * p.bias_row_stride + first_key)
                            << shift);
  const int last = ((min(kKeys, static_cast<int>(p.key_length) - first_key)) << shift) - 1;
  prefetch_l2(from), prefetch_l2(from + min(128, last)), prefetch_l2(from + last);
}

// Dropout's hash of a row's key.
template <int kDim, class Traits>
__device__ __forceinline__ void Scheduler<kDim, Traits>::describe_hash(Descriptor& descriptor, int row, int key) const {
  if constexpr (Traits::kHasOptions) {
    if (drops_keys()) descriptor.key_hash[row] = dropout_key_hash(static_cast<uint32_t>(key));
  }
}

// The same for a chunk of keys in order.
template <int kDim, class Traits>
__device__ __forceinline__ void Scheduler<kDim, Traits>::describe_hashes(Descriptor& descriptor, int first_key) const {
  if (!drops_keys()) return;
  for (int row = thread_; row < kKeys; row += kThreads) describe_hash(descriptor, row, first_key + row);
}

// The flags of computing warps that need the test, of all threads of the scheduler.
template <int kDim, class Traits>
__device__ __forceinline__ uint32_t Scheduler<kDim, Traits>::reduce_tested(uint32_t mine) {
  buffer_ ^= 1;
  mine = __reduce_or_sync(0xffffffffu, mine);
  if (thread_ % 32 == 0) queues_.warp_flags[buffer_][thread_ / 32] = mine;
  sync();
  uint32_t all = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) all |= queues_.warp_flags[buffer_][warp];
  return all * kTested;
}

// Writes into the descriptor which rows of the tile see the keys of this thread's rows of the chunk. Returns a flag for each
// computing warp that needs the test, because one of its rows does not see one of the first `tested` keys.
template <int kDim, class Traits>
__device__ __forceinline__ uint32_t Scheduler<kDim, Traits>::describe_seen(Descriptor& descriptor,
                                                                           const Span (&spans)[kRowsPerThread], int tested) {
  const int shift = work_.log2_heads_per_tile;  // a query is 2^shift rows
  int thread = thread_;
  asm volatile("" : "+r"(thread));  // so that what follows from it is computed here, not kept: registers are short
  uint32_t mine = 0;
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = thread + i * kThreads;
    const int first = min(max(spans[i].first - low_, 0), work_.queries) << shift;
    const int last = min(max(spans[i].last - low_, 0), work_.queries) << shift;
#pragma unroll
    for (int word = 0; word < kRows / 32; ++word) {
      const uint32_t rows = ones_from(max(first - 32 * word, 0)) & ~ones_from(max(last - 32 * word, 0));
      if (row < kKeys) {
        descriptor.seen[2 * word][Descriptor::seen_place(row)] = static_cast<uint16_t>(rows);
        descriptor.seen[2 * word + 1][Descriptor::seen_place(row)] = static_cast<uint16_t>(rows >> 16);
      }
    }
    // The warps all of whose rows see the key need no test of it: a bit for each.
    const int from_warp = (first + 15) / 16, to_warp = last / 16;
    const uint32_t whole = to_warp > from_warp ? (1u << to_warp) - (1u << from_warp) : 0;
    if (row < tested) mine |= ((1u << (kRows / 16)) - 1) & ~whole;
  }
  return reduce_tested(mine);
}

}  // namespace dmattn::cuda::sm90
