// Selection's sort keys: group, score and index of a key in one unsigned number, smaller = preferred.
//
// Keys are stored as complements. Written [group | score code | index] a larger number is preferred (a later group, a higher
// score, a later index), so the stored key is its complement and the padding of a sort, all ones, comes last. A score code is
// 0 for keys that must never be selected (hidden, sinks, NaN, -inf) and otherwise orders like the score. Narrow keys have 32
// bits of score and no group; float64 scores and documents need the wide ones.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../../params.h"

namespace dmattn::cuda::selection {

constexpr int32_t kForever = INT32_MAX, kNever = INT32_MIN;
constexpr int kIndexBits = 20;  // lengths up to 2^20
constexpr uint32_t kIndexMask = (1U << kIndexBits) - 1;
constexpr uint32_t kIneligible = 1U << 31;                // flag beside an index: the key can never be selected
constexpr int kChunkBits = 10, kChunk = 1 << kChunkBits;  // keys whose lifetimes one block resolves
constexpr int kMaxChunks = 1 << (kIndexBits - kChunkBits);
constexpr int kItems = 9;  // keys per thread of a sort; odd, so that threads hit different banks

using NarrowKey = uint64_t;
using WideKey = unsigned __int128;

template <class Key>
constexpr bool kIsWide = sizeof(Key) > 8;
template <class Key>
constexpr int kThreads = kIsWide<Key> ? 256 : 512;  // of a sort or merge block
template <class Key>
constexpr int kTile = kThreads<Key> * kItems;  // keys it handles
template <class Key>
using Code = std::conditional_t<kIsWide<Key>, uint64_t, uint32_t>;
template <class Key>
constexpr int kCodeBits = 8 * sizeof(Code<Key>);

// Everything selection keeps between its kernels; n = length, heads = all heads of all batches unless said otherwise.
struct Work {
  int32_t length = 0, chunks = 0, tiles = 0;  // tiles = ceil(length / kTile)
  int32_t window = 0;                         // at most length
  int32_t group_batches = 0, group_heads = 0;
  int32_t* groups = nullptr;   // [group_batches, group_heads, n]: first index of the key's group; null: one group
  void* keys[2] = {};          // [heads, n] sort keys, twice, as far as needed
  uint32_t* order = nullptr;   // [heads, n]: index | kIneligible, best first
  int32_t* counts = nullptr;   // [heads, tiles, chunks]: see find_thresholds; null: not wanted
  int32_t* bounds = nullptr;   // [heads, 1 + chunks]: see find_thresholds
  uint8_t* arrives = nullptr;  // [heads, n]: 1 when the key passes the threshold that holds at the start of its chunk
  uint32_t* doomed = nullptr;  // [heads, n]: a chunk's places hold the keys that die in it, best first, as in `order`
};

__device__ inline const int32_t* segments_of(const SelectParams& p, int64_t batch, int64_t head) {
  if (p.segment_end.data == nullptr) return nullptr;
  return static_cast<const int32_t*>(p.segment_end.data) + batch * p.segment_end.batch_stride +
         head / p.segment_end.head_divisor * p.segment_end.head_stride;
}

// The position a key's segment ends at; one at or before the key hides it.
__device__ inline int32_t segment_end_of(const int32_t* segments, int32_t index, int32_t length) {
  return segments == nullptr ? kForever : max(0, min(segments[index], length));
}

__device__ inline const int32_t* groups_of(const Work& work, int64_t batch, int64_t head) {
  if (work.groups == nullptr) return nullptr;
  const int64_t batch_head = (work.group_batches > 1 ? batch : 0) * work.group_heads + (work.group_heads > 1 ? head : 0);
  return work.groups + batch_head * work.length;
}

// Monotone in the score, 0 for NaN and -inf; -0 and +0 are equal scores.
__device__ inline uint32_t ordered_code(float score) {
  if (!(score > -INFINITY)) return 0;
  const uint32_t bits = __float_as_uint(score == 0.0F ? 0.0F : score);
  return bits >> 31 ? ~bits : bits | 0x80000000U;
}

__device__ inline uint64_t ordered_code(double score) {
  if (!(score > -static_cast<double>(INFINITY))) return 0;
  const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(score == 0.0 ? 0.0 : score));
  return bits >> 63 ? ~bits : bits | uint64_t{1} << 63;
}

// The low bits of a narrow code that follow from its highest one; not those of code 0, whose other bits no score has.
__device__ inline int silent_bits(DType dtype) { return dtype == DType::kBFloat16 ? 16 : dtype == DType::kFloat16 ? 13 : 0; }

// What the bits of a score of 32 or 16 bits are worth.
__device__ inline float score_of_bits(DType dtype, uint32_t bits) {
  if (dtype == DType::kFloat16) return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  return __uint_as_float(dtype == DType::kBFloat16 ? bits << 16 : bits);
}

// The codes of several scores, narrow and without documents, all of them read before the first is looked at: otherwise their
// latencies add up. at(i) says where the i-th lies.
template <int kCount, class At>
__device__ void read_codes(const SelectParams& p, uint32_t (&codes)[kCount], const At& at) {
  if (p.dtype == DType::kFloat32) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) codes[i] = static_cast<const uint32_t*>(p.scores.data)[at(i)];
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) codes[i] = static_cast<const uint16_t*>(p.scores.data)[at(i)];
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) codes[i] = ordered_code(score_of_bits(p.dtype, codes[i]));
}

// One head's view of the inputs.
struct Head {
  int64_t batch, head, scores;  // scores: offset of its first score
  const int32_t* segments;
  const int32_t* groups;

  __device__ Head(const SelectParams& p, const Work& work, int64_t batch_head)
      : batch(batch_head / p.heads),
        head(batch_head % p.heads),
        scores(batch * p.scores.batch_stride + head * p.scores.head_stride),
        segments(segments_of(p, batch, head)),
        groups(groups_of(work, batch, head)) {}
};

// Whether a visible key is among the first p.sink keys of its document.
__device__ inline bool is_sink(const SelectParams& p, const Head& head, int32_t index) {
  if (p.sink == 0) return false;
  return index - (head.groups ? head.groups[index] : 0) < p.sink;
}

// The end of a key that loses its place in the dynamic window to the key `cause`, or to itself if it never has one: keys compete
// when they leave the local window, p.local positions late. No key outlives its document.
__device__ inline int32_t later_by_local(const SelectParams& p, const Head& head, int32_t index, int32_t cause, int32_t length) {
  return p.local == 0 ? cause : min(cause + p.local, segment_end_of(head.segments, index, length));
}

// The end of a key that never takes a place of the dynamic window; selection is causal.
__device__ inline int32_t end_without_place(const SelectParams& p, const Head& head, int32_t index, int32_t length) {
  if (p.local == 0 && p.sink == 0) return index;
  const int32_t segment = segment_end_of(head.segments, index, length);
  if (segment <= index) return index;  // hidden
  return is_sink(p, head, index) ? segment : later_by_local(p, head, index, index, length);
}

// The code of one score of any type, for wide keys.
__device__ inline uint64_t code_of(const SelectParams& p, const Head& head, int32_t index, int32_t length) {
  if (segment_end_of(head.segments, index, length) <= index || is_sink(p, head, index)) return 0;
  const int64_t at = head.scores + index;
  if (p.dtype == DType::kFloat64) return ordered_code(static_cast<const double*>(p.scores.data)[at]);
  const uint32_t bits = p.dtype == DType::kFloat32 ? static_cast<const uint32_t*>(p.scores.data)[at]
                                                   : static_cast<const uint16_t*>(p.scores.data)[at];
  return ordered_code(score_of_bits(p.dtype, bits));
}

template <class Key>
__device__ Key make_key(Code<Key> code, int32_t group, int32_t index) {
  Key key = Key{code} << kIndexBits | static_cast<uint32_t>(index);
  if constexpr (kIsWide<Key>) key |= Key{static_cast<uint32_t>(group)} << (kIndexBits + kCodeBits<Key>);
  return ~key;
}

template <class Key>
__device__ uint32_t order_word(Key key) {
  const Key plain = ~key;
  const bool eligible = static_cast<Code<Key>>(plain >> kIndexBits) != 0;
  return (static_cast<uint32_t>(plain) & kIndexMask) | (eligible ? 0 : kIneligible);
}

__device__ inline int32_t index_of(uint32_t word) { return static_cast<int32_t>(word & kIndexMask); }
__device__ inline int32_t chunk_of(uint32_t word) { return index_of(word) >> kChunkBits; }

}  // namespace dmattn::cuda::selection
