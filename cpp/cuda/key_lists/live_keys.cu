// Makes lists of live keys: for each segment of the queries the keys that some query of it sees, in key order, or those that
// outlive the segment first and the others after them.
//
// The length of the segments, and the place of every list, are found as follows. Keys are counted by the first segment that
// sees them and by the last. The prefix sums of both counts give the length of every list, whatever the length of segments.
#include <algorithm>
#include <cub/block/block_scan.cuh>

#include "../calls.h"
#include "../common/dependent_launch.cuh"
#include "../common/device.cuh"
#include "../common/kernel_limits.cuh"
#include "../common/visibility.cuh"

namespace dmattn::cuda {
namespace {

constexpr int kWarps = 32, kThreads = kWarps * 32, kKeysPerLane = 4, kListThreads = 512;
constexpr int kItems = kMostSegments / kThreads;
static_assert(kThreads * kKeysPerLane == kPartKeys);
using Scan = cub::BlockScan<int, kThreads>;

constexpr int kLevels = 12;  // lengths of segments that are tried, each twice the one before, up to a single segment
static_assert(kOneSegment < 31 && kMostSegments <= 1 << (kLevels - 1));

struct Entry {
  int key;
  Span span;
};

// What LiveKeys holds of one mask head.
struct MaskHead {
  int32_t* index;
  int2 *span, *lists;
  int low, queries;        // the position of the first query, and how many queries there are
  int shortest, segments;  // the shift of the shortest segments, and how many of those the queries are
  const int32_t* counts;   // [count_blocks, 2, segments]

  __device__ __forceinline__ MaskHead(const AttentionParams& p, const LiveKeys& live_keys, int64_t mask_head_index)
      : index(live_keys.index + mask_head_index * live_keys.capacity),
        span(live_keys.span + mask_head_index * live_keys.capacity),
        lists(live_keys.lists + mask_head_index * live_keys.most_lists),
        low(static_cast<int>(p.key_length - p.query_length)),
        queries(static_cast<int>(p.query_length)),
        shortest(live_keys.shortest),
        segments(segments_at(queries, shortest)),
        counts(live_keys.counts + mask_head_index * live_keys.count_blocks * 2 * segments) {}

  __device__ __forceinline__ void write(int at, const Entry& entry) const {
    index[at] = entry.key;
    span[at] = {entry.span.first, entry.span.last};
  }
};

// How many keys a segment of 2^shift * kSegmentQueries queries sees. begun, ended: over the shortest segments, prefix sums of the
// keys whose first, or last, segment each is.
__device__ __forceinline__ int length_of(const int* begun, const int* ended, const MaskHead& mask_head, int segment, int shift) {
  const int from = segment << (shift - mask_head.shortest),
            to = min((segment + 1) << (shift - mask_head.shortest), mask_head.segments);
  return begun[to - 1] - (from > 0 ? ended[from - 1] : 0);
}

// The intervals of a mask head.
__device__ __forceinline__ SpanSource spans_of_mask_head(const AttentionParams& p, const LiveKeys& live_keys,
                                                         int mask_head_index) {
  const int heads = static_cast<int>(live_keys.heads), batch = mask_head_index / heads;
  return {p.mask, static_cast<int>(p.key_length), batch,
          (mask_head_index - batch * heads) * static_cast<int>(live_keys.head_divisor)};
}

// This thread's keys of a part. All of them are read, without a branch, before the first is looked at, so that their latencies
// overlap.
struct PartKeys {
  Entry entry[kKeysPerLane];
  __device__ __forceinline__ PartKeys(const SpanSource& spans, int part) {
    const int base = part * kPartKeys + threadIdx.x / 32 * (kKeysPerLane * 32) + threadIdx.x % 32,
              last_key = spans.key_length - 1;
    int first[kKeysPerLane], last[kKeysPerLane];
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) {
      const int at = min(base + i * 32, last_key);
      first[i] = spans.start ? spans.start[at] : kFirstPosition, last[i] = spans.end ? spans.end[at] : kLastPosition;
    }
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) {
      const int key = base + i * 32;
      entry[i] = {key, key <= last_key ? spans.span_of(key, first[i], last[i]) : Span::empty()};
    }
  }
};

// The parts of a mask head that are this block's work, one of `blocks` blocks.
struct PartsOfBlock {
  int first, last;
  __device__ __forceinline__ PartsOfBlock(const LiveKeys& live_keys, int block, int blocks) {
    const int parts = static_cast<int>(live_keys.parts), each = (parts + blocks - 1) / blocks;
    first = min(block * each, parts), last = min((block + 1) * each, parts);
  }
};

// Adds one to counts[which] for each lane that wants it. Lanes whose count is counts[common] add together, because adds to the
// same address are done one after the other.
__device__ __forceinline__ void add_one(int* counts, int which, int common, bool is_wanted) {
  const unsigned together = __ballot_sync(0xffffffffu, is_wanted && which == common);
  if (threadIdx.x % 32 == 0 && together) atomicAdd(&counts[common], __popc(together));
  if (is_wanted && which != common) atomicAdd(&counts[which], 1);
}

// Adds a block's keys to the counts of the first segment that sees each, and of the last. True when only some queries see some
// live key of this thread.
__device__ __forceinline__ bool count_keys(const PartKeys& keys, const MaskHead& mask_head, int* begun, int* ended) {
  const int high = mask_head.low + mask_head.queries - 1;
  bool has_partial = false;
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i) {
    const Span span = keys.entry[i].span;
    const bool is_live = span.touches(mask_head.low, high);
    has_partial |= is_live && !span.covers(mask_head.low, high);
    const int first = segment_of(max(span.first - mask_head.low, 0), mask_head.shortest);
    const int last = segment_of(min(span.last - 1 - mask_head.low, mask_head.queries - 1), mask_head.shortest);
    // Neighbouring keys mostly begin together, and end with them or never.
    const int common = __shfl_sync(0xffffffffu, first, 0);
    add_one(begun, first, common, is_live);
    add_one(ended, last, common, is_live && last < mask_head.segments - 1);
    add_one(ended, last, mask_head.segments - 1, is_live && last == mask_head.segments - 1);
  }
  return has_partial;
}

// The keys of a block that some position of [low, high] sees: which of this warp's, how many of the warps before, how many in
// all.
struct SeenKeys {
  unsigned seen[kKeysPerLane];  // a bit for each lane, a word for each 32 keys of the warp
  int before = 0, all;
  __device__ __forceinline__ SeenKeys(const PartKeys& keys, int low, int high, int (&warp_counts)[kWarps]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int in_warp = 0;
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) {
      seen[i] = __ballot_sync(0xffffffffu, keys.entry[i].span.touches(low, high));
      in_warp += __popc(seen[i]);
    }
    if (lane == 0) warp_counts[warp] = in_warp;
    __syncthreads();
    const int of_warp = warp_counts[lane];
    all = __reduce_add_sync(0xffffffffu, of_warp);
    before = __reduce_add_sync(0xffffffffu, lane < warp ? of_warp : 0);
  }
  // Calls use(place, entry) for the seen keys of this thread; places are in the order of the keys.
  template <class Use>
  __device__ __forceinline__ void for_each(const PartKeys& keys, const Use& use) const {
    int place = before;
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) {
      if (has_bit(seen[i], threadIdx.x % 32)) use(place + __popc(seen[i] & lanes_before()), keys.entry[i]);
      place += __popc(seen[i]);
    }
  }
};

constexpr int kFewSegments = 32;

// start, end [.., Sk] -> all of LiveKeys, where the keys of a mask head are one part and its segments no more than the lanes of a
// warp. A block for each mask head and segment counts for itself and makes that segment's list.
__global__ __launch_bounds__(kThreads) void small_lists_kernel(const __grid_constant__ AttentionParams p,
                                                               const __grid_constant__ LiveKeys live_keys) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  __shared__ int begun[kFewSegments], ended[kFewSegments], places[kFewSegments], warp_counts[2][kWarps];
  __shared__ int chosen_shift;
  const int lane = threadIdx.x % 32;
  const int mask_head_index = static_cast<int>(blockIdx.x);  // its keys are one part
  const PartKeys keys(spans_of_mask_head(p, live_keys, mask_head_index), 0);
  const MaskHead mask_head(p, live_keys, mask_head_index);
  if (threadIdx.x < kFewSegments) begun[threadIdx.x] = ended[threadIdx.x] = 0;
  __syncthreads();
  const bool is_one = !__syncthreads_or(count_keys(keys, mask_head, begun, ended)) && live_keys.joins;
  if (threadIdx.x < 32) {
    const auto sum_before = [&](int x, bool with_own) {
      int sum = x;
      for (int step = 1; step < 32; step *= 2) {
        const int left = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += left;
      }
      return with_own ? sum : sum - x;
    };
    const int begun_by = sum_before(lane < mask_head.segments ? begun[lane] : 0, true);
    const int ended_by = sum_before(lane < mask_head.segments ? ended[lane] : 0, true);
    begun[lane] = begun_by, ended[lane] = ended_by;
    __syncwarp();
    const int live = begun[mask_head.segments - 1];
    int shift = is_one ? kOneSegment : mask_head.shortest, count = 0, length = 0;
    for (;; ++shift) {
      count = segments_at(mask_head.queries, shift);
      length = lane < count && count > 1 ? length_of(begun, ended, mask_head, lane, shift) : 0;
      if (__reduce_add_sync(0xffffffffu, length) <= live_keys.capacity - p.key_length) break;
    }
    places[lane] = count > 1 ? static_cast<int>(p.key_length) + sum_before(length, false) : 0;
    if (lane == 0) chosen_shift = shift;
    if (blockIdx.y == 0) {
      if (lane < count) mask_head.lists[lane] = count > 1 ? int2{places[lane], length} : int2{0, live};
      if (lane == 0) live_keys.shift[mask_head_index] = shift, live_keys.count[mask_head_index] = live;
      if (lane == 0 && mask_head_index == 0) *live_keys.tile_counter = *live_keys.row_flags = 0;
    }
  }
  __syncthreads();
  const int shift = chosen_shift, count = segments_at(mask_head.queries, shift);
  const int segment = static_cast<int>(blockIdx.y);
  const auto write_seen = [&](int low, int high, int place, int (&scratch)[kWarps]) {
    SeenKeys(keys, low, high, scratch).for_each(keys, [&](int at, const Entry& entry) { mask_head.write(place + at, entry); });
  };
  if (count > 1 && segment < count) {
    const int low = mask_head.low + first_query_of(segment, shift),
              high = mask_head.low + min(first_query_of(segment + 1, shift), mask_head.queries) - 1;
    write_seen(low, high, places[segment], warp_counts[0]);
  }
  if (segment == 0 && (count == 1 || live_keys.keeps_live)) {
    write_seen(mask_head.low, mask_head.low + mask_head.queries - 1, 0, warp_counts[1]);
  }
}

// start, end [.., Sk] -> counts, partial [mask heads, count_blocks, ..], live [mask heads, parts]. Each of some blocks per mask
// head counts the keys of its parts by the first and by the last segment that sees them, adds both counts up, and counts the live
// keys of a part.
__global__ __launch_bounds__(kThreads) void count_kernel(const __grid_constant__ AttentionParams p,
                                                         const __grid_constant__ LiveKeys live_keys) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  __shared__ Scan::TempStorage scratch;
  __shared__ int begun[kMostSegments], ended[kMostSegments], warp_counts[kWarps];
  const int thread = threadIdx.x;
  const int blocks = static_cast<int>(live_keys.count_blocks), block = static_cast<int>(blockIdx.x),
            mask_head_index = block / blocks;
  const MaskHead mask_head(p, live_keys, mask_head_index);
  const SpanSource spans = spans_of_mask_head(p, live_keys, mask_head_index);
  for (int i = thread; i < mask_head.segments; i += kThreads) begun[i] = ended[i] = 0;
  __syncthreads();
  bool has_partial = false;
  const PartsOfBlock parts(live_keys, block - mask_head_index * blocks, blocks);
  for (int part = parts.first; part < parts.last; ++part) {
    const PartKeys keys(spans, part);
    has_partial |= count_keys(keys, mask_head, begun, ended);
    const SeenKeys live(keys, mask_head.low, mask_head.low + mask_head.queries - 1, warp_counts);
    if (thread == 0) live_keys.live[mask_head_index * live_keys.parts + part] = live.all;
    __syncthreads();
  }
  has_partial = __syncthreads_or(has_partial);
  int32_t* to = live_keys.counts + static_cast<int64_t>(blockIdx.x) * 2 * mask_head.segments;
  for (const int* counts : {begun, ended}) {
    int items[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) items[i] = thread * kItems + i < mask_head.segments ? counts[thread * kItems + i] : 0;
    Scan(scratch).InclusiveSum(items, items);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (thread * kItems + i < mask_head.segments) to[thread * kItems + i] = items[i];
    }
    to += mask_head.segments;
    __syncthreads();
  }
  if (thread == 0) live_keys.partial[blockIdx.x] = has_partial;
  if (blockIdx.x == 0 && thread == 0) *live_keys.tile_counter = *live_keys.row_flags = 0;
}

// Shared memory of a block that chooses.
struct Choice {
  Scan::TempStorage scratch;
  int begun[kMostSegments], ended[kMostSegments];  // keys whose first, or last, segment is this one or one before
  int64_t entries[kLevels];                        // of all lists, for segments 2^level times as long as the shortest
};

// One block chooses the length of a mask head's segments, as a shift, and the place of each list.
__device__ __forceinline__ void choose_lists(const AttentionParams& p, const LiveKeys& live_keys, int mask_head_index,
                                             Choice& choice) {
  int *const begun = choice.begun, *const ended = choice.ended;
  const int64_t* const entries = choice.entries;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int blocks = static_cast<int>(live_keys.count_blocks), key_length = static_cast<int>(p.key_length);
  const MaskHead mask_head(p, live_keys, mask_head_index);
  for (int i = thread; i < mask_head.segments; i += kThreads) begun[i] = ended[i] = 0;
  __syncthreads();
  for (int item = thread; item < blocks * mask_head.segments; item += kThreads) {
    const int segment = item % mask_head.segments;
    const int32_t* const counts = mask_head.counts + item / mask_head.segments * 2 * mask_head.segments + segment;
    atomicAdd(&begun[segment], counts[0]);
    atomicAdd(&ended[segment], counts[mask_head.segments]);
  }
  bool has_partial = thread < blocks && live_keys.partial[mask_head_index * blocks + thread] != 0;
  const bool is_one = !__syncthreads_or(has_partial) && live_keys.joins;
  const int live = begun[mask_head.segments - 1];
  if (warp < kLevels) {
    int64_t mine = 0;
    const int shift = mask_head.shortest + warp, count = segments_at(mask_head.queries, shift);
    for (int i = lane; i < count && count > 1; i += 32) mine += length_of(begun, ended, mask_head, i, shift);
    for (int step = 16; step > 0; step /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, step);
    if (lane == 0) choice.entries[warp] = mine;  // a single segment's list is that of the live keys
  }
  __syncthreads();
  int longer = 0;
  while (entries[longer] > live_keys.capacity - key_length) ++longer;
  // Take longer segments, and so fewer lists, while a list is on average at most 1/16 longer.
  const auto segments_of = [&](int more) {
    return static_cast<int64_t>(segments_at(mask_head.queries, mask_head.shortest + more));
  };
  const int least = longer;
  while (live_keys.lengthens && segments_of(longer) > 8 &&
         entries[longer + 1] * segments_of(least) * 16 <= entries[least] * segments_of(longer + 1) * 17) {
    ++longer;
  }
  const int shift = is_one ? kOneSegment : mask_head.shortest + longer, count = segments_at(mask_head.queries, shift);
  if (thread == 0) live_keys.shift[mask_head_index] = shift, live_keys.count[mask_head_index] = live;
  if (count == 1) {
    if (thread == 0) mask_head.lists[0] = {0, live};
    return;
  }
  int lengths[kItems], places[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    lengths[i] = thread * kItems + i < count ? length_of(begun, ended, mask_head, thread * kItems + i, shift) : 0;
  }
  Scan(choice.scratch).ExclusiveSum(lengths, places);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (thread * kItems + i < count) mask_head.lists[thread * kItems + i] = {key_length + places[i], lengths[i]};
  }
}

// Shared memory of a block that writes live keys.
struct LiveScratch {
  Span span[kPartKeys];
  int warp_counts[kWarps], before;
};

// One block writes the live keys of some parts of a mask head behind those of the parts before, and a summary of each group of
// them.
__device__ __forceinline__ void write_live(const AttentionParams& p, const LiveKeys& live_keys, int mask_head_index,
                                           const PartsOfBlock& parts, LiveScratch& live) {
  constexpr int kGroup = kPartKeys / kPartGroups;
  static_assert(kPartGroups == kWarps && kGroup % 32 == 0);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const MaskHead mask_head(p, live_keys, mask_head_index);
  const SpanSource spans = spans_of_mask_head(p, live_keys, mask_head_index);
  const int32_t* const live_of_part = live_keys.live + mask_head_index * live_keys.parts;
  if (thread == 0) live.before = 0;
  __syncthreads();
  int before = 0;
  for (int part = thread; part < parts.first; part += kThreads) before += live_of_part[part];
  if (before > 0) atomicAdd(&live.before, before);
  __syncthreads();
  before = live.before;
  for (int part = parts.first; part < parts.last; ++part) {
    const PartKeys keys(spans, part);
    const SeenKeys seen(keys, mask_head.low, mask_head.low + mask_head.queries - 1, live.warp_counts);
    seen.for_each(keys, [&](int at, const Entry& entry) {
      live.span[at] = entry.span;
      mask_head.write(before + at, entry);
    });
    __syncthreads();
    const int count = min(max(seen.all - warp * kGroup, 0), kGroup);
    int from = kLastPosition, to = kFirstPosition;
    for (int i = lane; i < count; i += 32) {
      const Span span = live.span[warp * kGroup + i];
      from = min(from, span.first), to = max(to, span.last);
    }
    from = __reduce_min_sync(0xffffffffu, from), to = __reduce_max_sync(0xffffffffu, to);
    if (lane == 0)
      live_keys.groups[(mask_head_index * live_keys.parts + part) * kPartGroups + warp] = {before + warp * kGroup, count, from,
                                                                                           to};
    before += seen.all;
    __syncthreads();
  }
}

// counts, partial, live -> shift, count, lists [mask heads, ..]: the first blocks, one for each mask head, choose where lists go.
// start, end, live -> index, span [mask heads, capacity], groups: the other blocks write the live keys.
__global__ __launch_bounds__(kThreads) void choose_kernel(const __grid_constant__ AttentionParams p,
                                                          const __grid_constant__ LiveKeys live_keys, int mask_heads,
                                                          int live_blocks) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  __shared__ union Storage {
    __device__ Storage() {}
    Choice choice;
    LiveScratch live;
  } storage;
  const int block = static_cast<int>(blockIdx.x);
  if (block < mask_heads) {
    choose_lists(p, live_keys, block, storage.choice);
  } else {
    const int mask_head_index = (block - mask_heads) / live_blocks;
    write_live(p, live_keys, mask_head_index, PartsOfBlock(live_keys, (block - mask_heads) % live_blocks, live_blocks),
               storage.live);
  }
}

// index, span, groups, lists -> the lists in index and span. Each of some blocks per mask head makes the lists of some segments,
// from the groups of live keys of which a segment may see some.
__global__ __launch_bounds__(kListThreads, 4) void list_kernel(const __grid_constant__ AttentionParams p,
                                                               const __grid_constant__ LiveKeys live_keys,
                                                               int blocks_of_mask_head) {
  constexpr int kListWarps = kListThreads / 32, kLanes = kPartKeys / kPartGroups / 32;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  __shared__ int2 groups[kListThreads];  // of the groups of which the segment may see some: where they begin, how many keys
  __shared__ int warp_counts[2][kListWarps];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int mask_head_index = static_cast<int>(blockIdx.x) / blocks_of_mask_head;
  const MaskHead mask_head(p, live_keys, mask_head_index);
  const int4* const all_groups = live_keys.groups + mask_head_index * live_keys.parts * kPartGroups;
  const int most_groups = static_cast<int>(live_keys.parts) * kPartGroups;
  const auto group_at = [&](int which) { return which < most_groups ? all_groups[which] : int4{0, 0, 0, 0}; };
  const int4 first_group = group_at(thread);  // read before it is known whether there is a list, so that both latencies overlap
  const int shift = live_keys.shift[mask_head_index], count = segments_at(mask_head.queries, shift);
  if (count == 1) return;
  int buffer = 0;
  // Adds up a count over the warps: those before this one, and all.
  const auto sum_over_warps = [&](int in_warp, int& before) {
    buffer ^= 1;
    if (lane == 0) warp_counts[buffer][warp] = in_warp;
    __syncthreads();
    const int of_lane = lane < kListWarps ? warp_counts[buffer][lane] : 0;
    before = __reduce_add_sync(0xffffffffu, lane < warp ? of_lane : 0);
    return __reduce_add_sync(0xffffffffu, of_lane);
  };
  for (int segment = static_cast<int>(blockIdx.x) - mask_head_index * blocks_of_mask_head; segment < count;
       segment += blocks_of_mask_head) {
    const int low = mask_head.low + first_query_of(segment, shift),
              high = mask_head.low + min(first_query_of(segment + 1, shift), mask_head.queries) - 1;
    const int2 list = mask_head.lists[segment];
    // The list is filled from the front, with the keys that end in the segment from the back.
    int front = list.x, back = list.x + list.y - 1;
    const int ending = live_keys.by_lifetime ? high : kFirstPosition;  // keys that end by then come from the back
    for (int first = 0; first < most_groups; first += kListThreads) {
      const int4 group = first > 0 ? group_at(first + thread) : first_group;
      const bool is_touched = group.y > 0 && Span{group.z, group.w}.touches(low, high);
      const unsigned touched = __ballot_sync(0xffffffffu, is_touched);
      int before;
      const int touched_groups = sum_over_warps(__popc(touched), before);
      if (is_touched) groups[before + __popc(touched & lanes_before())] = {group.x, group.y};
      __syncthreads();
      for (int base = 0; base < touched_groups; base += kListWarps) {
        const int2 from = base + warp < touched_groups ? groups[base + warp] : int2{0, 0};
        const int32_t* const index = mask_head.index + from.x + lane;
        const int2* const span = mask_head.span + from.x + lane;
        Entry entry[kLanes];
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          const bool is_present = i * 32 + lane < from.y;
          entry[i].span = is_present ? Span::of(span[i * 32]) : Span::empty();
          entry[i].key = is_present ? index[i * 32] : 0;
        }
        int in_warp = 0;  // keys from the front in the low half, from the back in the high half
        bool from_front[kLanes], from_back[kLanes];
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          const bool is_seen = entry[i].span.touches(low, high), ends = entry[i].span.last <= ending;
          from_front[i] = is_seen && !ends, from_back[i] = is_seen && ends;
          in_warp += __popc(__ballot_sync(0xffffffffu, from_front[i])) + (__popc(__ballot_sync(0xffffffffu, from_back[i])) << 16);
        }
        int before_warp;
        const int all = sum_over_warps(in_warp, before_warp);
        int front_at = front + (before_warp & 0xffff), back_at = back - (before_warp >> 16);
        front += all & 0xffff, back -= all >> 16;
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          const unsigned stay = __ballot_sync(0xffffffffu, from_front[i]), end = __ballot_sync(0xffffffffu, from_back[i]);
          if (from_front[i]) mask_head.write(front_at + __popc(stay & lanes_before()), entry[i]);
          if (from_back[i]) mask_head.write(back_at - __popc(end & lanes_before()), entry[i]);
          front_at += __popc(stay), back_at -= __popc(end);
        }
      }
      __syncthreads();
    }
  }
}

}  // namespace

cudaError_t launch_live_keys(const AttentionParams& p, const LiveKeys& live_keys, cudaStream_t stream) {
  const unsigned mask_heads = grid_of(live_keys.batches * live_keys.heads), parts = static_cast<unsigned>(live_keys.parts);
  const int segments = segments_at(static_cast<int>(p.query_length), live_keys.shortest);
  if (parts == 1 && segments <= kFewSegments) {
    return launch_dependent(small_lists_kernel, dim3(mask_heads, static_cast<unsigned>(segments)), kThreads, 0, stream, p,
                            live_keys);
  }
  const unsigned live_blocks = static_cast<unsigned>(blocks_per_mask_head(live_keys.parts, mask_heads, mask_heads));
  cudaError_t status =
      launch_dependent(count_kernel, grid_of(live_keys.count_blocks * mask_heads), kThreads, 0, stream, p, live_keys);
  if (status == cudaSuccess) {
    status = launch_dependent(choose_kernel, grid_of((int64_t{live_blocks} + 1) * mask_heads), kThreads, 0, stream, p, live_keys,
                              static_cast<int>(mask_heads), static_cast<int>(live_blocks));
  }
  if (status == cudaSuccess && segments > 1) {
    // As many blocks as an H200 runs at once, and at least one for each two of the shortest segments, which are often joined.
    const int blocks = std::clamp(512 / static_cast<int>(mask_heads), (segments + 1) / 2, segments);
    status = launch_dependent(list_kernel, grid_of(int64_t{blocks} * mask_heads), kListThreads, 0, stream, p, live_keys, blocks);
  }
  return status;
}

}  // namespace dmattn::cuda
