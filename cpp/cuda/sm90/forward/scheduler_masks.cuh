// The scheduler for keys in order: all of them, or those that intervals, ranges or a block mask leave.
#pragma once

#include "scheduler.cuh"

namespace dmattn::cuda::sm90 {

template <int kDim, class Traits>
__device__ __forceinline__ void Scheduler<kDim, Traits>::schedule_in_order() {
  const AttentionParams& p = call_.p;
  const KeyLimits limits(p.mask, static_cast<int>(p.key_length), low_, high_);
  // Tensor copies take columns of a bias from a multiple of 16 bytes on. Only the last key can lie between (has_copied_bias).
  constexpr int kWhole = Traits::kBias == Bias::kCopied ? 8 : 1;
  for (int end = (limits.limit + kWhole - 1) / kWhole * kWhole; end > 0; end -= kKeys) {
    Descriptor& descriptor = begin_chunk();
    const int base = end - kKeys;
    if (thread_ == 0) descriptor.first_key = base;
    if (thread_ < kKeys) describe_bias(descriptor, thread_, base + thread_);
    describe_hashes(descriptor, base);
    fetch_bias(base);
    accept(kInOrder | (end > limits.whole_limit || base < 0 ? kLimit : 0));
  }
}

// The same with intervals. Keys that no query of the tile sees are `dead`: whatever they hold is replaced by zeros, and their
// key_bias by -inf. Chunks with keys that only some of the queries see are tested, by those warps of which some row does not.
template <int kDim, class Traits>
__device__ __forceinline__ void Scheduler<kDim, Traits>::schedule_intervals() {
  const AttentionParams& p = call_.p;
  const SpanSource spans(p.mask, static_cast<int>(p.key_length), batch_, head_);
  if (!spans.has_intervals()) {
    schedule_in_order();
    return;
  }
  // What all threads of the scheduler find together: a bit for each computing warp that has to test, then these.
  constexpr uint32_t kTouched = 1 << 16, kMissed = 1 << 17, kLate = 1 << 18;
  static_assert(kRows / 16 <= 12);
  int end = KeyLimits(p.mask, static_cast<int>(p.key_length), low_, high_).limit;
  Span next[kRowsPerThread];
  const auto read = [&](int base) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = thread_ + i * kThreads;
      next[i] = spans.of_key(row < kKeys ? base + row : -1);
    }
  };
  read(end - kKeys);
  for (; end > 0; end -= kKeys) {
    const int base = end - kKeys, shift = work_.log2_heads_per_tile;
    Span span[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) span[i] = next[i];
    if (base > 0) read(base - kKeys);  // a chunk ahead, so that the latency is hidden
    Descriptor& descriptor = begin_chunk();
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = thread_ + i * kThreads;
      const bool is_seen = span[i].touches(low_, high_), is_dead = row < kKeys && !is_seen;
      const uint32_t dead = __ballot_sync(0xffffffffu, is_dead);
      if (thread_ % 32 == 0 && row < kKeys) descriptor.dead[row / 32] = dead;
      found |= is_dead ? kMissed : 0;
      if (!is_seen) continue;
      // The warps all of whose rows see the key need no test of it.
      const int from = (((max(span[i].first - low_, 0)) << shift) + 15) / 16;
      const int to = (min(span[i].last - low_, work_.queries) << shift) / 16;
      const uint32_t whole = to > from ? (1u << to) - (1u << from) : 0;
      found |= kTouched | (((1u << (kRows / 16)) - 1) & ~whole) | (span[i].first > low_ ? kLate : 0);
    }
    buffer_ ^= 1;
    found = __reduce_or_sync(0xffffffffu, found);
    if (thread_ % 32 == 0) queues_.warp_flags[buffer_][thread_ / 32] = found;
    sync();
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) found |= queues_.warp_flags[buffer_][warp];
    if (!(found & kTouched)) continue;
    const uint32_t tested = found & (kTouched - 1);
    if (tested) {
#pragma unroll
      for (int i = 0; i < kRowsPerThread; ++i) {
        const int row = thread_ + i * kThreads;
        if (row >= kKeys) continue;
        const bool is_seen = span[i].touches(low_, high_);
        descriptor.last[row] = is_seen ? span[i].last : kFirstPosition;
        if (found & kLate) descriptor.span[row] = Seen::of(is_seen ? span[i] : Span::empty());
      }
    }
    if (thread_ == 0) descriptor.first_key = base;
    accept(kInOrder | (found & kMissed ? kGaps : 0) | (tested ? kSpans : 0) | (tested && found & kLate ? kStarts : 0) |
           tested * kTested);
  }
}

template <int kDim, class Traits>
__device__ __forceinline__ void Scheduler<kDim, Traits>::schedule_block_mask() {
  const AttentionParams& p = call_.p;
  const MaskParams& mask = p.mask;
  const int tile_q = static_cast<int>(mask.tile_q), tile_k = static_cast<int>(mask.tile_k);
  const int tiles_k = static_cast<int>(mask.tiles_k), key_length = static_cast<int>(p.key_length);
  const KeyLimits limits(mask, key_length, low_, high_);
  const TileSource source(mask, batch_, head_);
  const SpanSource spans(mask, key_length, batch_, head_);
  const int tile_row = first_query_ / tile_q;
  const int32_t *const list = source.rows + tile_row * (tiles_k + 1) + 1, *const states = source.tiles + tile_row * tiles_k;
  const int entries = min(max(list[-1], 0), tiles_k);
  for (int entry = 0; entry < entries; ++entry) {
    const int place = entry % kThreads;
    if (place == 0) {  // as many entries at once as there are threads, so that their latencies are one
      sync();
      const int tile = entry + thread_ < entries ? list[entry + thread_] : -1;
      queues_.entries[thread_] = tile;
      queues_.states[thread_] = tile >= 0 && tile < tiles_k ? states[tile] : kTileEmpty;
      sync();
    }
    const int first = queues_.entries[place] * tile_k, state = queues_.states[place];
    if (!is_live_tile(mask, state)) continue;
    const uint32_t* bits = bits_of_tile(mask, state);
    if (bits) bits += first_query_ % tile_q * (tile_k / 32);
    for (int base = first; base < min(first + tile_k, limits.limit); base += kKeys) {
      Descriptor& descriptor = begin_chunk();
      if (thread_ == 0) descriptor.first_key = base;
      uint32_t flags = kInOrder;
      if (bits || base + kKeys > limits.whole_limit || spans.has_intervals()) {
        flags = test_chunk(descriptor, spans, base, bits ? bits + (base - first) / 32 : nullptr, tile_k / 32);
        if (flags == 0) continue;
      }
      if (Traits::kBias == Bias::kPair && thread_ < kKeys) {
        const int key = base + thread_;
        descriptor.key_bias[Descriptor::bias_place(thread_)] = key_bias_ && key < key_length ? key_bias_[key] : 0.0f;
      }
      fetch_bias(base);
      accept(flags);
    }
  }
}

// All keys of the tile's range. Those that no query of the tile sees get index -1, so that whatever they hold is never loaded.
template <int kDim, class Traits>
__device__ __forceinline__ void Scheduler<kDim, Traits>::schedule_range() {
  const LiveKeys& live_keys = call_.live_keys;
  const MaskParams& mask = call_.p.mask;
  const int key_length = static_cast<int>(call_.p.key_length);
  const KeyLimits limits(mask, key_length, low_, high_);
  const SpanSource spans(mask, key_length, batch_, head_);
  const int2 range = live_keys.ranges[live_keys.mask_head_of(batch_, head_) * live_keys.range_count + first_query_ / kRows];
  const int first = key_length - range.x, limit = min(range.y, limits.limit);
  for (int end = limit; end > first; end -= kKeys) {
    // The last chunk begins with the first key of the range, if that has a chunk's keys: keys before it are seldom seen, and a
    // chunk with keys that no query sees is copied row by row. The chunk before has had some of its keys; they are hidden.
    const int base = end - kKeys < first && limit - first >= kKeys ? first : end - kKeys;
    Descriptor& descriptor = begin_chunk();
    if (thread_ == 0) descriptor.first_key = base;
    bool touches = false, misses = false, covers = true;
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      const int row = thread_ + i * kThreads, key = base + row;
      if (row >= kKeys) continue;
      const Span span = spans.of_key(key);
      const bool is_seen = span.touches(low_, high_), is_new = key < end;
      touches |= is_seen, misses |= !is_seen;
      covers &= is_new && span.covers(mask.is_causal ? max(low_, key) : low_, high_);
      descriptor.span[row] = Seen::of(is_new ? span : Span::empty());
      descriptor.index[Descriptor::key_place(row)] = is_seen ? key : -1;
    }
    if (!any(touches)) continue;
    const bool has_gaps = any(misses), is_tested = any(!covers);
    accept((has_gaps ? 0 : kInOrder) | (is_tested ? kSpans : end > limits.whole_limit ? kLimit : 0));
  }
}

// Fills in index, spans and bits. Returns the flags of the chunk, 0 when no query of the tile sees any of its keys. Keys that
// no query of the tile sees get index -1, so that whatever they hold is never loaded.
template <int kDim, class Traits>
__device__ __forceinline__ uint32_t Scheduler<kDim, Traits>::test_chunk(Descriptor& descriptor, const SpanSource& spans, int base,
                                                                        const uint32_t* bits, int stride) {
  bool touches = false, covers = true, is_missing = false;
  if (thread_ < kKeys) {
    const Span span = spans.of_key(base + thread_);
    touches = span.touches(low_, high_);
    covers = span.covers(low_, high_);
    is_missing = !touches;
    descriptor.span[thread_] = Seen::of(span);
    descriptor.index[index_place<kKeys>(thread_)] = touches ? base + thread_ : -1;
  }
  if (!any(touches)) return 0;
  const bool is_whole = !any(!covers);
  if (!bits && is_whole) return kInOrder;
  if (!bits) return Traits::kKeys != Keys::kInOrder || any(is_missing) ? kSpans : kInOrder | kSpans;
  // Bits and span together may hide a key from every query, so what a span hides is cleared in the bits.
#pragma unroll
  for (int w = 0; w < kKeys / 32; ++w) {
    uint32_t word = thread_ <= high_ - low_ ? bits[thread_ * stride + w] : 0;
    if (!is_whole) word = bits_seen_at(word, &descriptor.span[w * 32], low_ + thread_);
    descriptor.bits[thread_][w] = word;
    const uint32_t seen = __reduce_or_sync(0xffffffffu, word);
    if (thread_ % 32 == 0) queues_.some_see[thread_ / 32][w] = seen;
  }
  sync();
  bool is_seen = false;
  if (thread_ < kKeys) {
    uint32_t seen = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) seen |= queues_.some_see[warp][thread_ / 32];
    is_seen = has_bit(seen, thread_ % 32);
    if (!is_seen) descriptor.index[index_place<kKeys>(thread_)] = -1;
  }
  return any(is_seen) ? static_cast<uint32_t>(kBits) : 0;
}

}  // namespace dmattn::cuda::sm90
