// The scheduler warps of the Hopper forward: they run ahead of the warps that load and compute, find the keys that each query
// tile sees, and write a descriptor for each chunk of them. common/scheduler.cuh says what this scheduler shares with the one of
// the portable family, and why no more.
//
// Compact keys, and keys in order where no block mask is given, are taken backwards from the last one that the tile sees. Chunks
// then end where visibility ends, so no key behind that is ever loaded. What a tensor copy reads in front of the first key is
// zero, and so is what it reads behind the last one, where chunks end at multiples of 8 keys.
#pragma once

#include "../../common/scheduler.cuh"
#include "../../key_lists/compact_keys.cuh"
#include "../../ptx/tma.cuh"
#include "shared.cuh"

namespace dmattn::cuda::sm90 {

// One object for each scheduler thread; all threads of the scheduler call the same methods together.
template <int kDim, class Traits>
class Scheduler {
 public:
  using Queues = SchedulerQueues<kDim, Traits>;
  using Descriptor = TileDescriptor<kDim, Traits>;

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
    // The first tile is that of the block's number: the producer loads its queries before it has a descriptor.
    for (uint32_t work_tile = blockIdx.x; work_tile < count_work_tiles();) {
      schedule_tile(work_tile);
      // Take the next tile, as late as the computing warps leave time for, so that no block holds tiles while others have none.
      const bool is_first = work_tile == blockIdx.x;
      if (thread_ == 0) {
        uint32_t next = count_work_tiles();
        if (work_.is_static) next = queues_.work_tile + grid_size();
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
                       kDescriptors = kForwardShape<kDim, Traits>.descriptors,
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

  // ---- the order of tiles under a block mask (scheduler_order.cuh) ----

  // With a block mask some tiles meet many more keys than others. The quarter with the fewest is taken last, so that the blocks
  // finish together. Every block finds these short tiles for itself, among those that no block has as its first, while its own
  // first tile is computed.
  static constexpr uint32_t kMostOrdered = 32 * kThreads;  // tiles that can be ordered: a thread has a bit for each of 32

  __device__ __forceinline__ void find_short_tiles(uint32_t work_tiles);
  __device__ __forceinline__ uint32_t long_first(uint32_t at, uint32_t work_tiles);
  __device__ __forceinline__ int entries_of(uint32_t work_tile) const;

  __device__ __forceinline__ void schedule_tile(uint32_t work_tile) {
    const AttentionParams& p = call_.p;
    const WorkTile<Traits> tile(call_, work_, work_tile);
    batch_ = tile.batch, head_ = tile.head, first_query_ = tile.first_query;
    const int shift = static_cast<int>(p.key_length - p.query_length);
    low_ = tile.first_query + shift;
    high_ = min(tile.first_query + work_.queries, static_cast<int>(p.query_length)) - 1 + shift;
    key_bias_ = Traits::kBias != Bias::kPair ? nullptr : row_of<const float>(p.key_bias, tile.batch, tile.head);
    first_flag_ = kFirst;
    if constexpr (Traits::kKeys == Keys::kIntervals) {
      schedule_intervals();
    } else if constexpr (Traits::kIsDense) {
      schedule_in_order();
    } else if constexpr (Traits::kIsUnion) {
      schedule_union();
    } else if constexpr (Traits::kGathers) {
      schedule_live_keys();
    } else if constexpr (Traits::kKeys == Keys::kRange) {
      schedule_range();
    } else if (Queues::kHasLists && call_.live_keys.index) {
      schedule_live_keys();
    } else if (p.mask.tiles.data) {
      schedule_block_mask();
    } else if (Traits::kKeys == Keys::kInOrder && call_.live_keys.ranges) {
      schedule_range();
    } else {
      schedule_in_order();
    }
    if (!Traits::kIsUnion && !has_pending_) {  // no query sees a key: a chunk without keys keeps all warps in step
      Descriptor& descriptor = begin_chunk();
      if (thread_ == 0) descriptor.first_key = -kKeys;
      if (Traits::kBias == Bias::kPair && thread_ < kKeys) descriptor.key_bias[Descriptor::bias_place(thread_)] = 0.0f;
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

  // ---- keys in order (scheduler_masks.cuh) ----

  __device__ __forceinline__ void schedule_in_order();
  __device__ __forceinline__ void schedule_intervals();
  __device__ __forceinline__ void schedule_block_mask();
  __device__ __forceinline__ void schedule_range();
  __device__ __forceinline__ uint32_t test_chunk(Descriptor& descriptor, const SpanSource& spans, int base, const uint32_t* bits,
                                                 int stride);

  // ---- gathered keys (scheduler_lists.cuh) ----

  __device__ __forceinline__ void schedule_live_keys();
  __device__ __forceinline__ void schedule_union();
  template <bool kIsDirect>
  __device__ __forceinline__ void schedule_list();
  __device__ __forceinline__ void schedule_compact();
  template <bool kIsDirect>
  __device__ __forceinline__ Span span_at(int at) const;
  // Does the list have keys that are not in the queues yet?
  __device__ __forceinline__ bool has_fetched() const { return at_ - kBlock < listed_; }
  template <bool kIsDirect>
  __device__ __forceinline__ void fetch();
  template <bool kIsDirect>
  __device__ __forceinline__ void read();
  template <bool kIsDirect>
  __device__ __forceinline__ void refill();
  __device__ __forceinline__ void take_whole_chunk();
  template <bool kIsDirect>
  __device__ __forceinline__ void take_mixed_chunk();

  // ---- what a descriptor says of single keys (scheduler_descriptors.cuh) ----

  __device__ __forceinline__ void describe_bias(Descriptor& descriptor, int row, int key) const;
  __device__ __forceinline__ void fetch_bias(int first_key) const;
  // Does the call drop weights, so that descriptors need the hashes of keys?
  __device__ __forceinline__ bool drops_keys() const { return Traits::kHasOptions && call_.threshold != 0; }
  __device__ __forceinline__ void describe_hash(Descriptor& descriptor, int row, int key) const;
  __device__ __forceinline__ void describe_hashes(Descriptor& descriptor, int first_key) const;
  // The bits from `first` on, none when first is 32 or more: this shift does not take its amount modulo 32.
  static __device__ __forceinline__ uint32_t ones_from(int first) {
    uint32_t ones;
    asm("shl.b32 %0, 0xffffffff, %1;" : "=r"(ones) : "r"(first));
    return ones;
  }
  __device__ __forceinline__ uint32_t reduce_tested(uint32_t mine);
  __device__ __forceinline__ uint32_t describe_seen(Descriptor& descriptor, const Span (&spans)[kRowsPerThread], int tested);

  static constexpr bool kMayBeDirect = Traits::kGathers && !Traits::kHasOptions && kDim <= kMostDirectDim;
  static constexpr int kPerThread = 4, kBlock = kPerThread * kThreads;  // entries of a list that are read at once
  static_assert(!Queues::kHasLists || Queues::kRing >= kBlock + 2 * kKeys);
  static constexpr bool kReadsAhead = Traits::kGathers && !Traits::kHasOptions;  // the others have no registers to spare
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

// The definitions of its methods, one file for each idea.
#include "scheduler_descriptors.cuh"
#include "scheduler_lists.cuh"
#include "scheduler_masks.cuh"
#include "scheduler_order.cuh"
#include "scheduler_union.cuh"
