// The scheduler warps of the Hopper forward: they run ahead of the warps that load and compute, find the keys that each query
// tile sees, and write a descriptor for each chunk of them. common/scheduler.cuh says what this scheduler shares with the one of
// the portable family, and why no more.
//
// Compact keys, and keys in order where no block mask is given, are taken backwards from the last one that the tile sees. Chunks
// then end where visibility ends, so no key behind that is ever loaded. What a tensor copy reads in front of the first key is
// zero, and so is what it reads behind the last one, where chunks end at multiples of 8 keys.
#pragma once

#include "../common/scheduler.cuh"
#include "../key_lists/compact_keys.cuh"
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "tile_descriptor.cuh"
#include "work_tile.cuh"

namespace dmattn::cuda::sm90 {

// What the scheduler keeps in shared memory. The plain and dense variants have no lists, and so no queues.
template <int kDim, Variant kVariant>
struct SchedulerQueues {
  static constexpr int kThreads = kForwardShape<kDim, kVariant>.scheduler_threads(), kWarps = kThreads / 32;
  static constexpr bool kHasLists = kMayGather<kVariant>;
  static constexpr int kRing = kHasLists ? 1024 : 1;
  // The place of the n-th entry of a queue, n >= 0; a remainder of signed numbers would be four instructions.
  static __device__ __forceinline__ int place(int n) { return n & (kRing - 1); }
  int32_t whole[kRing];    // keys that every query of the tile sees
  int32_t partial[kRing];  // places in the list of keys that some see
  // Aligned, so that a buffer is read without words beside it, which another warp may be writing.
  alignas(16) int warp_counts[2][kWarps];
  alignas(16) uint32_t warp_flags[2][kWarps];
  uint32_t some_see[kWarps][4];  // of the queries of each warp: which keys of a chunk does one see? A bit for each key
  uint32_t work_tile;            // the next one
  // With a block mask: some entries of its row of tiles, and their states.
  static constexpr bool kHasEntries = takes_blocks(kVariant);
  int32_t entries[kHasEntries ? kThreads : 1], states[kHasEntries ? kThreads : 1];
  // With a block mask, for each thread: which of its tiles are short, and how many tiles of the threads before it are.
  // short_tiles: how many of all; 0: tiles are taken in the order of their numbers.
  static constexpr bool kHasOrder = kVariant == Variant::kPlain;
  uint32_t is_short[kHasOrder ? kThreads : 1];
  uint16_t short_before[kHasOrder ? kThreads : 1];
  int short_tiles;
};

template <int kDim, Variant kVariant>
class Scheduler {
 public:
  using Queues = SchedulerQueues<kDim, kVariant>;
  using Descriptor = TileDescriptor<kDim, kVariant>;

  // thread: among the scheduler's threads.
  __device__ __forceinline__ Scheduler(const ForwardCall& call, const ForwardWork& work, int thread, Queues& queues,
                                       Descriptor* descriptors, uint32_t descriptor_full, uint32_t descriptor_empty)
      : call_(call),
        work_(work),
        queues_(queues),
        descriptors_(descriptors),
        descriptor_full_(descriptor_full),
        descriptor_empty_(descriptor_empty),
        thread_(thread) {}

  // Schedules tile after tile, and writes a descriptor with kEnd when none is left.
  __device__ __forceinline__ void run() {
    if (thread_ == 0) queues_.work_tile = blockIdx.x;
    // The first tile is that of the block's number: load_tiles loads its queries before it has a descriptor.
    for (uint32_t work_tile = blockIdx.x; work_tile < count_work_tiles();) {
      schedule_tile(work_tile);
      // Take the next tile, as late as the computing warps leave time for, so that no block holds tiles while others have none.
      const bool is_first = work_tile == blockIdx.x;
      if (thread_ == 0) {
        uint32_t next = count_work_tiles();
        if (work_.has_static_schedule) next = queues_.work_tile + grid_size();
        if (work_.tile_counter) next = grid_size() + static_cast<uint32_t>(atomicAdd(work_.tile_counter, 1));
        queues_.work_tile = next;
      }
      sync();
      work_tile = queues_.work_tile;
      sync();
      if constexpr (Queues::kHasOrder) {
        const MaskParams& mask = call_.p.mask;
        const uint32_t work_tiles = count_work_tiles();
        if (work_tile >= work_tiles || !mask.tiles.data || mask.is_causal || work_tiles - gridDim.x > kMostOrdered) continue;
        if (is_first) find_short_tiles(work_tiles);
        if (queues_.short_tiles > 0) work_tile = long_first(work_tile - gridDim.x, work_tiles);
      }
    }
    begin_chunk();
    accept(kEnd);
    publish(0);
  }

 private:
  static constexpr int kThreads = Queues::kThreads, kWarps = Queues::kWarps, kKeys = Descriptor::kKeys, kRows = Descriptor::kRows,
                       kDescriptors = kForwardShape<kDim, kVariant>.descriptors,
                       kRowsPerThread = (kKeys + kThreads - 1) / kThreads;  // of a chunk

  // Recomputed at every call, because registers are short.
  __device__ __forceinline__ uint32_t count_work_tiles() const {
    uint32_t work_tiles;
    asm volatile("mul.lo.u32 %0, %1, %2;" : "=r"(work_tiles) : "r"(work_.tiles), "r"(work_.head_groups));
    return work_tiles;
  }

  static constexpr int kBarrier = 1;  // 0 is the whole block's
  __device__ __forceinline__ void sync() const { group_sync(kBarrier, kThreads); }
  __device__ __forceinline__ bool any(bool mine) const { return group_any(kBarrier, kThreads, mine); }

  // ---- the order of tiles under a block mask ----

  // With a block mask some tiles meet many more keys than others. The quarter with the fewest is taken last, so that the blocks
  // finish together. Every block finds these short tiles for itself, among those that no block has as its first, while its own
  // first tile is computed.
  static constexpr uint32_t kMostOrdered = 32 * kThreads;  // tiles that can be ordered: a thread has a bit for each of 32

  __device__ __forceinline__ void find_short_tiles(uint32_t work_tiles) {
    const int others = static_cast<int>(work_tiles - gridDim.x), each = (others + kThreads - 1) / kThreads;
    // Find the largest number of entries than which at most a quarter of a sample of the tiles have fewer.
    const int sample = entries_of(gridDim.x + static_cast<uint32_t>(others * thread_ / kThreads));
    int few = 0;
    for (int step = 1 << (31 - __clz(static_cast<int>(call_.p.mask.tiles_k))); step > 0; step /= 2) {
      if (group_count(kBarrier, kThreads, sample < few + step) <= kThreads / 4) few += step;
    }
    uint32_t is_short = 0;
    if (any(sample < few)) {  // otherwise tiles are alike
      for (int i = 0; i < each && thread_ * each + i < others; ++i) {
        if (entries_of(gridDim.x + static_cast<uint32_t>(thread_ * each + i)) < few) is_short |= 1u << i;
      }
    }
    const int mine = __popc(is_short);
    int up_to = mine;
    for (int step = 1; step < 32; step *= 2) {
      const int left = __shfl_up_sync(0xffffffffu, up_to, step);
      if (thread_ % 32 >= step) up_to += left;
    }
    if (thread_ % 32 == 31) queues_.warp_counts[0][thread_ / 32] = up_to;
    sync();
    int before = up_to - mine, all = 0;
    for (int w = 0; w < kWarps; ++w) {
      const int other = queues_.warp_counts[0][w];
      before += w < thread_ / 32 ? other : 0;
      all += other;
    }
    queues_.is_short[thread_] = is_short;
    queues_.short_before[thread_] = static_cast<uint16_t>(before);
    if (thread_ == 0) queues_.short_tiles = all;
    sync();
  }

  // The tile that is `at`-th in that order. The thread that has its bit tells the others.
  __device__ __forceinline__ uint32_t long_first(uint32_t at, uint32_t work_tiles) {
    const int others = static_cast<int>(work_tiles - gridDim.x), each = (others + kThreads - 1) / kThreads;
    const int first = thread_ * each, mine = max(0, min(each, others - first));
    const int long_tiles = others - queues_.short_tiles, short_before = queues_.short_before[thread_];
    const bool is_short = static_cast<int>(at) >= long_tiles;
    const int rank = static_cast<int>(at) - (is_short ? long_tiles + short_before : first - short_before);
    const uint32_t tiles = queues_.is_short[thread_] ^ (is_short ? 0u : 0xffffffffu);
    uint32_t candidates = mine == 32 ? tiles : tiles & ((1u << mine) - 1);
    if (rank >= 0 && rank < __popc(candidates)) {
      for (int i = 0; i < rank; ++i) candidates &= candidates - 1;
      queues_.work_tile = gridDim.x + static_cast<uint32_t>(first + __ffs(static_cast<int>(candidates)) - 1);
    }
    sync();
    const uint32_t work_tile = queues_.work_tile;
    sync();
    return work_tile;
  }

  __device__ __forceinline__ int entries_of(uint32_t work_tile) const {
    const WorkTile<kVariant> tile(call_, work_, work_tile);
    const MaskParams& mask = call_.p.mask;
    const int count =
        TileSource(mask, tile.batch, tile.head).rows[tile.first_query / static_cast<int>(mask.tile_q) * (mask.tiles_k + 1)];
    return min(max(count, 0), static_cast<int>(mask.tiles_k));
  }

  __device__ __forceinline__ void schedule_tile(uint32_t work_tile) {
    const AttentionParams& p = call_.p;
    const WorkTile<kVariant> tile(call_, work_, work_tile);
    batch_ = tile.batch, head_ = tile.head, first_query_ = tile.first_query;
    const int shift = static_cast<int>(p.key_length - p.query_length);
    low_ = tile.first_query + shift;
    high_ = min(tile.first_query + work_.queries, static_cast<int>(p.query_length)) - 1 + shift;
    key_bias_ = kVariant != Variant::kGeneral ? nullptr : row_of<const float>(p.key_bias, tile.batch, tile.head);
    first_flag_ = kFirst;
    if constexpr (kVariant == Variant::kKeyBias) {
      schedule_intervals();
    } else if constexpr (is_dense(kVariant)) {
      schedule_in_order();
    } else if constexpr (gathers_keys(kVariant)) {
      schedule_live_keys();
    } else if constexpr (kVariant == Variant::kRange) {
      schedule_range();
    } else if (Queues::kHasLists && call_.live_keys.index) {
      schedule_live_keys();
    } else if (p.mask.tiles.data) {
      schedule_block_mask();
    } else if (kVariant == Variant::kPlain && call_.live_keys.ranges) {
      schedule_range();
    } else {
      schedule_in_order();
    }
    if (!has_pending_) {  // no query sees a key: a chunk without keys keeps all warps in step
      Descriptor& descriptor = begin_chunk();
      if (thread_ == 0) descriptor.first_key = -kKeys;
      if (kVariant == Variant::kGeneral && thread_ < kKeys) descriptor.key_bias[Descriptor::bias_place(thread_)] = 0.0f;
      accept(kInOrder | kLimit);
    }
    publish(kLast);
  }

  // ---- descriptors: begun, filled in, accepted, and published once it is known whether another one follows ----

  __device__ __forceinline__ Descriptor& begin_chunk() {
    const uint32_t place = begun_ % kDescriptors;
    barrier_wait(descriptor_empty_ + 8 * place, (begun_ / kDescriptors % 2) ^ 1);
    return descriptors_[place];
  }

  __device__ __forceinline__ void accept(uint32_t flags) {
    const uint32_t place = begun_ % kDescriptors;
    if (has_pending_) publish(0);
    if (thread_ == 0 && first_flag_) {
      Descriptor& descriptor = descriptors_[place];
      descriptor.batch = batch_, descriptor.head = head_, descriptor.first_query = first_query_;
    }
    pending_flags_ = flags | first_flag_;
    first_flag_ = 0;
    has_pending_ = true;
    ++begun_;
  }

  __device__ __forceinline__ void publish(uint32_t flag) {
    const uint32_t place = (begun_ - 1) % kDescriptors;
    if (thread_ == 0) descriptors_[place].flags = pending_flags_ | flag;
    barrier_arrive(descriptor_full_ + 8 * place);
    has_pending_ = false;
  }

  // ---- all keys, or as many as causality allows ----

  __device__ __forceinline__ void schedule_in_order() {
    const AttentionParams& p = call_.p;
    const KeyLimits limits(p.mask, static_cast<int>(p.key_length), low_, high_);
    // Tensor copies take columns of a bias from a multiple of 16 bytes on. Only the last key can lie between (has_copied_bias).
    constexpr int kWhole = copies_bias(kVariant) ? 8 : 1;
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
  __device__ __forceinline__ void schedule_intervals() {
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

  // ---- the live tiles of a block mask, intervals beside it or not ----

  __device__ __forceinline__ void schedule_block_mask() {
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
        if (kVariant == Variant::kGeneral && thread_ < kKeys) {
          const int key = base + thread_;
          descriptor.key_bias[Descriptor::bias_place(thread_)] = key_bias_ && key < key_length ? key_bias_[key] : 0.0f;
        }
        fetch_bias(base);
        accept(flags);
      }
    }
  }

  // ---- keys in order, under intervals ----

  // All keys of the tile's range. Those that no query of the tile sees get index -1, so that whatever they hold is never loaded.
  __device__ __forceinline__ void schedule_range() {
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
  __device__ __forceinline__ uint32_t test_chunk(Descriptor& descriptor, const SpanSource& spans, int base, const uint32_t* bits,
                                                 int stride) {
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
    if (!bits) return kVariant != Variant::kPlain || any(is_missing) ? kSpans : kInOrder | kSpans;
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

  // ---- live keys gathered ----

  __device__ __forceinline__ void schedule_live_keys() {
    const LiveKeys& live_keys = call_.live_keys;
    const AttentionParams& p = call_.p;
    if (kVariant == Variant::kGathered && live_keys.is_direct && !p.mask.start.data && !p.mask.end.data) {
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
    if (gathers_keys(kVariant) && is_compact(call_, mask_head)) {
      schedule_compact();
    } else {
      schedule_list<false>();
    }
  }

  // kIsDirect: there is no list, all keys up to the last that the tile may see are listed, and index_ and span_ are the head's
  // rows of start and end.
  template <bool kIsDirect>
  __device__ __forceinline__ void schedule_list() {
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
  __device__ __forceinline__ void schedule_compact() {
    for (int end = listed_; end > 0; end -= kKeys) {
      Descriptor& descriptor = begin_chunk();
      if (thread_ == 0) descriptor.first_key = end - kKeys;
      accept(kInOrder | kCompact | (end < kKeys ? kLimit : 0));
    }
  }

  // The span of a listed key.
  template <bool kIsDirect>
  __device__ __forceinline__ Span span_at(int at) const {
    if (!kIsDirect) return Span::of(span_[at]);
    const int32_t* const end = reinterpret_cast<const int32_t*>(span_);
    return SpanSource(call_.p.mask, static_cast<int>(call_.p.key_length), index_, end).of_key(at);
  }

  // Does the list have keys that are not in the queues yet?
  __device__ __forceinline__ bool has_fetched() const { return at_ - kBlock < listed_; }

  // Moves on to the next keys of the list, and where registers allow starts to read them, a refill ahead, so that the latency is
  // hidden.
  template <bool kIsDirect>
  __device__ __forceinline__ void fetch() {
    // A warp's keys are neighbours in the list, so that the queues keep the order of the keys.
    fetched_at_ = at_ + thread_ / 32 * (32 * kPerThread) + thread_ % 32;
    at_ += kBlock;
    if (kReadsAhead) read<kIsDirect>();
  }

  template <bool kIsDirect>
  __device__ __forceinline__ void read() {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int at = fetched_at_ + i * 32;
      fetched_[i] = at < listed_ ? span_at<kIsDirect>(at) : Span::empty();
      if (!kIsDirect) fetched_key_[i] = at < listed_ ? index_[at] : 0;
    }
  }

  // Puts the keys that were read into the queues, and moves on to the next.
  template <bool kIsDirect>
  __device__ __forceinline__ void refill() {
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
  __device__ __forceinline__ void take_whole_chunk() {
    const int first = queues_.whole[Queues::place(whole_head_)], last = queues_.whole[Queues::place(whole_head_ + kKeys - 1)];
    Descriptor& descriptor = begin_chunk();
    const bool is_run = last - first == kKeys - 1;  // keys ascend, so they are neighbours when their ends are so far apart
    if (thread_ == 0) descriptor.first_key = first;
    if (!is_run || kVariant == Variant::kGeneral || drops_keys()) {
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
  template <bool kIsDirect>
  __device__ __forceinline__ void take_mixed_chunk() {
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
    if (gathers_keys(kVariant) && from_partial <= kFewRows && from_whole > 0) {
      flags = (from_partial > 0 ? kFew : 0) | (taken < kKeys ? kGaps : 0);
    }
    if (thread_ == 0) descriptor.rows_present = taken;
    if constexpr (Descriptor::kIsGathered)
      flags |= describe_seen(descriptor, span, flags & kSpans ? kKeys : min(kFewRows, taken));
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

  // The general variant's key_bias of a row.
  __device__ __forceinline__ void describe_bias(Descriptor& descriptor, int row, int key) const {
    if (kVariant != Variant::kGeneral) return;
    descriptor.key_bias[Descriptor::bias_place(row)] = key_bias_ && key >= 0 ? key_bias_[key] : 0.0f;
  }

  // Brings the general variant's bias of a chunk from memory into L2. A thread takes a row of the tile.
  __device__ __forceinline__ void fetch_bias(int first_key) const {
    const AttentionParams& p = call_.p;
    if (kVariant != Variant::kGeneral || !p.bias.data) return;
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

  // Does the call drop weights, so that descriptors need the hashes of keys?
  __device__ __forceinline__ bool drops_keys() const { return has_options(kVariant) && call_.threshold != 0; }
  // Dropout's hash of a row's key.
  __device__ __forceinline__ void describe_hash(Descriptor& descriptor, int row, int key) const {
    if constexpr (has_options(kVariant)) {
      if (drops_keys()) descriptor.key_hash[row] = dropout_key_hash(static_cast<uint32_t>(key));
    }
  }
  // The same for a chunk of keys in order.
  __device__ __forceinline__ void describe_hashes(Descriptor& descriptor, int first_key) const {
    if (!drops_keys()) return;
    for (int row = thread_; row < kKeys; row += kThreads) describe_hash(descriptor, row, first_key + row);
  }

  // The bits from `first` on, none when first is 32 or more: this shift does not take its amount modulo 32.
  static __device__ __forceinline__ uint32_t ones_from(int first) {
    uint32_t ones;
    asm("shl.b32 %0, 0xffffffff, %1;" : "=r"(ones) : "r"(first));
    return ones;
  }

  // Writes into the descriptor which rows of the tile see the keys of this thread's rows of the chunk. Returns a flag for each
  // computing warp that needs the test, because one of its rows does not see one of the first `tested` keys.
  __device__ __forceinline__ uint32_t describe_seen(Descriptor& descriptor, const Span (&spans)[kRowsPerThread], int tested) {
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
    buffer_ ^= 1;
    mine = __reduce_or_sync(0xffffffffu, mine);
    if (thread % 32 == 0) queues_.warp_flags[buffer_][thread / 32] = mine;
    sync();
    uint32_t all = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) all |= queues_.warp_flags[buffer_][warp];
    return all * kTested;
  }

  static constexpr bool kMayBeDirect = kVariant == Variant::kGathered && kDim <= kMostDirectDim;
  static constexpr int kPerThread = 4, kBlock = kPerThread * kThreads;  // entries of a list that are read at once
  static_assert(!Queues::kHasLists || Queues::kRing >= kBlock + 2 * kKeys);
  static constexpr bool kReadsAhead = kVariant == Variant::kGathered;  // the others have no registers to spare
  const ForwardCall& call_;
  const ForwardWork& work_;
  Queues& queues_;
  Descriptor* const descriptors_;
  const uint32_t descriptor_full_, descriptor_empty_;
  const int thread_;
  // The descriptors: how many are begun, and the flags of the accepted one that is not published yet.
  uint32_t begun_ = 0, pending_flags_ = 0, first_flag_ = 0;
  bool has_pending_ = false;
  // The tile, and the positions of its first and last query.
  int batch_ = 0, head_ = 0, first_query_ = 0, low_ = 0, high_ = 0;
  const float* key_bias_ = nullptr;
  // The list, where keys are gathered: its length listed_, and where the next entries to fetch begin. Then the queues.
  Span fetched_[kPerThread];
  int fetched_key_[kPerThread], fetched_at_ = 0;
  const int32_t* index_ = nullptr;
  const int2* span_ = nullptr;
  int listed_ = 0, at_ = 0, buffer_ = 0;
  int whole_head_ = 0, whole_count_ = 0, partial_head_ = 0, partial_count_ = 0;
};

}  // namespace dmattn::cuda::sm90
