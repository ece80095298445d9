// The scheduler for gathered keys: reads the list of a tile's live keys and makes chunks of them.
#pragma once

#include "scheduler.cuh"

namespace dmattn::cuda::sm90 {

template <int kDim, class Traits>
__device__ __forceinline__ void Scheduler<kDim, Traits>::schedule_live_keys() {
  const LiveKeys& live_keys = call_.live_keys;
  const AttentionParams& p = call_.p;
  if (Traits::kGathers && !Traits::kHasOptions && live_keys.is_direct && !p.mask.start.data && !p.mask.end.data) {
    schedule_in_order();
    return;
  }
  if (kMayBeDirect && live_keys.is_direct) {
    index_ = row_of<const int32_t>(p.mask.start, batch_, head_);
    span_ = reinterpret_cast<const int2*>(row_of<const int32_t>(p.mask.end, batch_, head_));
    listed_ = KeyLimits(p.mask, static_cast<int>(p.key_length), low_, high_).limit;
    schedule_list<kMayBeDirect>();
    return;
  }
  const int64_t mask_head = live_keys.mask_head_of(batch_, head_);
  const KeyList list(live_keys, mask_head, first_query_);
  index_ = list.index, span_ = list.span, listed_ = list.count;
  if (Traits::kGathers && is_compact(call_, mask_head)) {
    schedule_compact();
  } else {
    schedule_list<false>();
  }
}

// kIsDirect: there is no list, all keys up to the last that the tile may see are listed, and index_ and span_ are the head's
// rows of start and end.
template <int kDim, class Traits>
template <bool kIsDirect>
__device__ __forceinline__ void Scheduler<kDim, Traits>::schedule_list() {
  at_ = 0;
  whole_head_ = whole_count_ = partial_head_ = partial_count_ = 0;
  fetch<kIsDirect>();
  for (;;) {
    // Read on until there is a chunk, and until it is known whether another one follows.
    while (has_fetched() && (max(whole_count_, partial_count_) < kKeys || whole_count_ + partial_count_ == kKeys)) {
      refill<kIsDirect>();
    }
    if (whole_count_ + partial_count_ == 0) break;
    if (whole_count_ >= kKeys) {
      take_whole_chunk();
    } else {
      take_mixed_chunk<kIsDirect>();
    }
    if (whole_count_ + partial_count_ > 0) publish(0);
  }
}

// Every query sees all keys of the list, and their compact copies are in order. They are taken from the end, so that nothing
// behind them is read.
template <int kDim, class Traits>
__device__ __forceinline__ void Scheduler<kDim, Traits>::schedule_compact() {
  for (int end = listed_; end > 0; end -= kKeys) {
    Descriptor& descriptor = begin_chunk();
    if (thread_ == 0) descriptor.first_key = end - kKeys;
    accept(kInOrder | kCompact | (end < kKeys ? kLimit : 0));
  }
}

// The span of a listed key.
template <int kDim, class Traits>
template <bool kIsDirect>
__device__ __forceinline__ Span Scheduler<kDim, Traits>::span_at(int at) const {
  if (!kIsDirect) return Span::of(span_[at]);
  const int32_t* const end = reinterpret_cast<const int32_t*>(span_);
  return SpanSource(call_.p.mask, static_cast<int>(call_.p.key_length), index_, end).of_key(at);
}

// Moves on to the next keys of the list, and where registers allow starts to read them, a refill ahead, so that the latency is
// hidden.
template <int kDim, class Traits>
template <bool kIsDirect>
__device__ __forceinline__ void Scheduler<kDim, Traits>::fetch() {
  // A warp's keys are neighbours in the list, so that the queues keep the order of the keys.
  fetched_at_ = at_ + thread_ / 32 * (32 * kPerThread) + thread_ % 32;
  at_ += kBlock;
  if (kReadsAhead) read<kIsDirect>();
}

template <int kDim, class Traits>
template <bool kIsDirect>
__device__ __forceinline__ void Scheduler<kDim, Traits>::read() {
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int at = fetched_at_ + i * 32;
    fetched_[i] = at < listed_ ? span_at<kIsDirect>(at) : Span::empty();
    if (!kIsDirect) fetched_key_[i] = at < listed_ ? index_[at] : 0;
  }
}

// Puts the keys that were read into the queues, and moves on to the next.
template <int kDim, class Traits>
template <bool kIsDirect>
__device__ __forceinline__ void Scheduler<kDim, Traits>::refill() {
  if (!kReadsAhead) read<kIsDirect>();
  const int warp = thread_ / 32, block_at = fetched_at_;
  const uint32_t before = (1u << (thread_ % 32)) - 1;
  int key[kPerThread];
  uint32_t whole[kPerThread], partial[kPerThread];
  int counts = 0;  // whole in the low half, partial in the high half
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    key[i] = kIsDirect ? fetched_at_ + i * 32 : fetched_key_[i];
    const bool touches = fetched_[i].touches(low_, high_), covers = fetched_[i].covers(low_, high_);
    whole[i] = __ballot_sync(0xffffffffu, touches && covers);
    partial[i] = __ballot_sync(0xffffffffu, touches && !covers);
    counts += __popc(whole[i]) + (__popc(partial[i]) << 16);
  }
  fetch<kIsDirect>();
  buffer_ ^= 1;
  if (thread_ % 32 == 0) queues_.warp_counts[buffer_][warp] = counts;
  sync();
  int place, total;
  add_counts(queues_.warp_counts[buffer_], warp, place, total);
  int whole_place = whole_head_ + whole_count_ + (place & 0xffff);
  int partial_place = partial_head_ + partial_count_ + (place >> 16);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (has_bit(whole[i], thread_ % 32)) queues_.whole[Queues::place(whole_place + __popc(whole[i] & before))] = key[i];
    if (has_bit(partial[i], thread_ % 32)) {
      // Not Queues::place, with which the assembler spills a register at D=256.
      queues_.partial[(partial_place + __popc(partial[i] & before)) % Queues::kRing] = block_at + i * 32;
    }
    whole_place += __popc(whole[i]);
    partial_place += __popc(partial[i]);
  }
  whole_count_ += total & 0xffff;
  partial_count_ += total >> 16;
  sync();
}

// A chunk of keys that all queries see, while there are enough.
template <int kDim, class Traits>
__device__ __forceinline__ void Scheduler<kDim, Traits>::take_whole_chunk() {
  const int first = queues_.whole[Queues::place(whole_head_)], last = queues_.whole[Queues::place(whole_head_ + kKeys - 1)];
  Descriptor& descriptor = begin_chunk();
  const bool is_run = last - first == kKeys - 1;  // keys ascend, so they are neighbours when their ends are so far apart
  if (thread_ == 0) descriptor.first_key = first;
  if (!is_run || Traits::kBias == Bias::kPair || drops_keys()) {
#pragma unroll
    for (int row = thread_; row < kKeys; row += kThreads) {
      const int key = queues_.whole[Queues::place(whole_head_ + row)];
      descriptor.index[index_place<kKeys>(row)] = key;
      describe_bias(descriptor, row, key);
      describe_hash(descriptor, row, key);
    }
  }
  whole_head_ += kKeys, whole_count_ -= kKeys;
  accept(is_run ? static_cast<uint32_t>(kInOrder) : 0);
}

// A chunk of keys that some queries see, filled up with keys that all of them see.
template <int kDim, class Traits>
template <bool kIsDirect>
__device__ __forceinline__ void Scheduler<kDim, Traits>::take_mixed_chunk() {
  const int from_partial = min(partial_count_, kKeys);
  const int from_whole = min(whole_count_, kKeys - from_partial), taken = from_partial + from_whole;
  int key[kRowsPerThread];
  Span span[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = thread_ + i * kThreads;
    key[i] = Descriptor::kIsGathered ? 0 : -1, span[i] = Span::empty();
    if (row < from_partial) {
      const int at = queues_.partial[Queues::place(partial_head_ + row)];
      key[i] = kIsDirect ? at : index_[at];
      span[i] = span_at<kIsDirect>(at);
    } else if (row < taken) {
      key[i] = queues_.whole[Queues::place(whole_head_ + row - from_partial)];
      span[i] = {kFirstPosition, kLastPosition};
    }
  }
  uint32_t flags = kSpans;
  Descriptor& descriptor = begin_chunk();
  // Without a key that all queries see some query may see none. Then every row is tested, so that the row of such a query stays
  // empty whatever it holds.
  if (Traits::kGathers && from_partial <= kFewRows && from_whole > 0) {
    flags = (from_partial > 0 ? kFew : 0) | (taken < kKeys ? kGaps : 0);
  }
  if (thread_ == 0) descriptor.rows_present = taken;
  if constexpr (Descriptor::kIsGathered) flags |= describe_seen(descriptor, span, flags & kSpans ? kKeys : min(kFewRows, taken));
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const int row = thread_ + i * kThreads;
    if (row >= kKeys) break;
    descriptor.index[index_place<kKeys>(row)] = key[i];
    if (!Descriptor::kIsGathered) descriptor.span[row] = Seen::of(span[i]);
    describe_bias(descriptor, row, key[i]);
    describe_hash(descriptor, row, key[i]);
  }
  partial_head_ += from_partial, partial_count_ -= from_partial;
  whole_head_ += from_whole, whole_count_ -= from_whole;
  accept(flags);
}

}  // namespace dmattn::cuda::sm90
