// What the schedulers of both families share: how far keys in order go, the list of a tile, the counts of its warps, and the test
// of bits against spans.
//
// The two schedulers are separate because they keep their state in different places. In the portable family all threads of a
// block first schedule a chunk, then compute it. Their registers belong to the products, so the scheduler keeps what it looks up
// and how full its queues are in shared memory, and makes one chunk per call. On Hopper the scheduler warps do nothing else and
// run ahead of the others. Their state is in registers; they prefetch lists, take keys in order backwards, and write descriptors
// of what each computing warp has to test. The ballots that separate whole keys from partial ones are written out in both: made a
// function, they compile to different code that is no faster.
#pragma once

#include "../live_keys.h"
#include "visibility.cuh"

namespace dmattn::cuda {

// Of keys in order, as far as length and causality go: the keys before `limit` are seen by some query of a tile, those before
// `whole_limit` by every query. low, high: positions of the tile's first and last query.
struct KeyLimits {
  int limit, whole_limit;
  __device__ __forceinline__ KeyLimits(const MaskParams& mask, int key_length, int low, int high)
      : limit(mask.is_causal ? max(0, min(key_length, high + 1)) : key_length),
        whole_limit(mask.is_causal ? min(key_length, low + 1) : key_length) {}
};

// The list of live keys of a segment.
struct KeyList {
  const int32_t* index;
  const int2* span;
  int count;
  // That of the segment of a query, of one mask head.
  __device__ __forceinline__ KeyList(const LiveKeys& live_keys, int64_t mask_head, int query) {
    const int2 list = live_keys.lists[mask_head * live_keys.most_lists + segment_of(query, live_keys.shift[mask_head])];
    const int64_t begin = mask_head * live_keys.capacity + list.x;
    index = live_keys.index + begin;
    span = live_keys.span + begin;
    count = list.y;
  }
};

// The counts of all warps added up: those before a warp, and all.
template <int kWarps>
__device__ __forceinline__ void add_counts(const int (&warp_counts)[kWarps], int warp, int& before, int& all) {
  before = all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int other = warp_counts[w];
    before += w < warp ? other : 0;
    all += other;
  }
}

// Of the bits of 32 keys those whose span sees the position, too. spans: Span or Seen.
template <class AnySpan>
__device__ __forceinline__ uint32_t bits_seen_at(uint32_t bits, const AnySpan* spans, int position) {
  for (uint32_t left = bits; left; left &= left - 1) {
    const int key = __ffs(static_cast<int>(left)) - 1;
    if (!spans[key].sees(position)) bits &= ~(1u << key);
  }
  return bits;
}

}  // namespace dmattn::cuda
