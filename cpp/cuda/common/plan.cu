// The plan of a call with intervals: for each segment of the queries the keys that some of them see, in key order.
//
// The one surprise is how the segments' length is found, and everything's place: prefix sums of keys by the segment that first
// sees them and by the last that does give the length of every list at every length of segments.
#include <algorithm>
#include <cub/block/block_scan.cuh>

#include "../attention_launch.h"
#include "dependent_launch.cuh"
#include "device.cuh"
#include "packed.cuh"
#include "visibility.cuh"

namespace dmattn::cuda {
namespace {

constexpr int kWarps = 32, kThreads = kWarps * 32, kKeysPerLane = 4, kListThreads = 512;
constexpr int kItems = kMostSegments / kThreads;
static_assert(kThreads * kKeysPerLane == kPlanPart);
using Scan = cub::BlockScan<int, kThreads>;

constexpr int kLevels = 12;  // of how much longer segments may be than the shortest, until one is all
static_assert(kOneSegment < 31 && kMostSegments <= 1 << kLevels - 1);

struct Entry {
  int key;
  Span span;
};

// A row of the plan.
struct PlanRow {
  int32_t* index;
  int2 *span, *lists;
  int low, queries;        // the position of the first query
  int shortest, segments;  // the shortest segments, and how many they are
  const int32_t* counts;   // [count_blocks, 2, segments]

  __device__ __forceinline__ PlanRow(const AttentionParams& p, const Plan& plan, int64_t row)
      : index(plan.index + row * plan.capacity),
        span(plan.span + row * plan.capacity),
        lists(plan.lists + row * plan.most_lists),
        low(static_cast<int>(p.key_length - p.query_length)),
        queries(static_cast<int>(p.query_length)),
        shortest(plan.shortest),
        segments(segments_at(queries, shortest)),
        counts(plan.counts + row * plan.count_blocks * 2 * segments) {}

  __device__ __forceinline__ void write(int at, const Entry& entry) const {
    index[at] = entry.key;
    span[at] = {entry.span.first, entry.span.last};
  }
};

// How many keys a segment of 2^shift * kSegmentQueries queries sees, by prefix sums over segments of the shortest kind.
__device__ __forceinline__ int length_of(const int* begun, const int* ended, const PlanRow& row, int segment, int shift) {
  const int from = segment << shift - row.shortest, to = min(segment + 1 << shift - row.shortest, row.segments);
  return begun[to - 1] - (from > 0 ? ended[from - 1] : 0);
}

// The intervals of a row of the plan.
__device__ __forceinline__ SpanSource spans_of_row(const AttentionParams& p, const Plan& plan, int row) {
  const int heads = static_cast<int>(plan.heads), batch = row / heads;
  return {p.mask, static_cast<int>(p.key_length), batch, (row - batch * heads) * static_cast<int>(plan.head_divisor)};
}

// The keys of a part of a row, by thread: all of them read before the first is looked at, and without a branch.
struct PartKeys {
  Entry entry[kKeysPerLane];
  __device__ __forceinline__ PartKeys(const SpanSource& spans, int part) {
    const int base = part * kPlanPart + threadIdx.x / 32 * (kKeysPerLane * 32) + threadIdx.x % 32,
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

// The parts of a row that are the work of one of `blocks` blocks.
struct PartsOfBlock {
  int first, last;
  __device__ __forceinline__ PartsOfBlock(const Plan& plan, int block, int blocks) {
    const int parts = static_cast<int>(plan.parts), each = (parts + blocks - 1) / blocks;
    first = min(block * each, parts), last = min((block + 1) * each, parts);
  }
};

// Adds one to a count for each lane that says so; those of `common` at once, because equal addresses take turns.
__device__ __forceinline__ void add_one(int* counts, int which, int common, bool is_wanted) {
  const unsigned together = __ballot_sync(0xffffffffu, is_wanted && which == common);
  if (threadIdx.x % 32 == 0 && together) atomicAdd(&counts[common], __popc(together));
  if (is_wanted && which != common) atomicAdd(&counts[which], 1);
}

// Adds how many of a block's keys each segment is the first, or the last, to see. True when some of this thread's are seen by a
// part of the queries only.
__device__ __forceinline__ bool count_keys(const PartKeys& keys, const PlanRow& row, int* begun, int* ended) {
  const int high = row.low + row.queries - 1;
  bool has_partial = false;
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i) {
    const Span span = keys.entry[i].span;
    const bool is_live = span.touches(row.low, high);
    has_partial |= is_live && !span.covers(row.low, high);
    const int first = segment_of(max(span.first - row.low, 0), row.shortest);
    const int last = segment_of(min(span.last - 1 - row.low, row.queries - 1), row.shortest);
    // Neighbouring keys mostly begin together, and end with them or never.
    const int common = __shfl_sync(0xffffffffu, first, 0);
    add_one(begun, first, common, is_live);
    add_one(ended, last, common, is_live && last < row.segments - 1);
    add_one(ended, last, row.segments - 1, is_live && last == row.segments - 1);
  }
  return has_partial;
}

// Which of a block's keys positions [low, high] see, and how many of those there are before this warp's and in all.
struct SeenKeys {
  unsigned seen[kKeysPerLane];  // by lanes, one word for each 32 keys of the warp
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
  // Calls use(place, entry) for those of this thread, places in the order of the keys.
  template <class Use>
  __device__ __forceinline__ void for_each(const PartKeys& keys, const Use& use) const {
    int place = before;
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) {
      if (seen[i] >> threadIdx.x % 32 & 1) use(place + __popc(seen[i] & lanes_before()), keys.entry[i]);
      place += __popc(seen[i]);
    }
  }
};

// The whole plan where the keys of a row are one part and its segments no more than a warp's lanes: a block per row and segment
// counts for itself and makes that list from the keys.
constexpr int kFewSegments = 32;
__global__ __launch_bounds__(kThreads) void small_plan_kernel(const __grid_constant__ AttentionParams p,
                                                              const __grid_constant__ Plan plan) {
  wait_for_kernel_before();
  let_kernel_after_come();
  __shared__ int begun[kFewSegments], ended[kFewSegments], places[kFewSegments], warp_counts[2][kWarps];
  __shared__ int chosen_shift;
  const int lane = threadIdx.x % 32;
  const int row_number = static_cast<int>(blockIdx.x);  // its keys are one part
  const PartKeys keys(spans_of_row(p, plan, row_number), 0);
  const PlanRow row(p, plan, row_number);
  if (threadIdx.x < kFewSegments) begun[threadIdx.x] = ended[threadIdx.x] = 0;
  __syncthreads();
  const bool is_one = !__syncthreads_or(count_keys(keys, row, begun, ended)) && plan.joins;
  if (threadIdx.x < 32) {
    const auto sum_before = [&](int x, bool with_own) {
      int sum = x;
      for (int step = 1; step < 32; step *= 2) {
        const int left = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += left;
      }
      return with_own ? sum : sum - x;
    };
    const int begun_by = sum_before(lane < row.segments ? begun[lane] : 0, true);
    const int ended_by = sum_before(lane < row.segments ? ended[lane] : 0, true);
    begun[lane] = begun_by, ended[lane] = ended_by;
    __syncwarp();
    const int live = begun[row.segments - 1];
    int shift = is_one ? kOneSegment : row.shortest, count = 0, length = 0;
    for (;; ++shift) {
      count = segments_at(row.queries, shift);
      length = lane < count && count > 1 ? length_of(begun, ended, row, lane, shift) : 0;
      if (__reduce_add_sync(0xffffffffu, length) <= plan.capacity - p.key_length) break;
    }
    places[lane] = count > 1 ? static_cast<int>(p.key_length) + sum_before(length, false) : 0;
    if (lane == 0) chosen_shift = shift;
    if (blockIdx.y == 0) {
      if (lane < count) row.lists[lane] = count > 1 ? int2{places[lane], length} : int2{0, live};
      if (lane == 0) plan.shift[row_number] = shift, plan.count[row_number] = live;
      if (lane == 0 && row_number == 0) *plan.ticket = *plan.row_flags = 0;
    }
  }
  __syncthreads();
  const int shift = chosen_shift, count = segments_at(row.queries, shift);
  const int segment = static_cast<int>(blockIdx.y);
  const auto write_seen = [&](int low, int high, int place, int (&scratch)[kWarps]) {
    SeenKeys(keys, low, high, scratch).for_each(keys, [&](int at, const Entry& entry) { row.write(place + at, entry); });
  };
  if (count > 1 && segment < count) {
    const int low = row.low + first_query_of(segment, shift),
              high = row.low + min(first_query_of(segment + 1, shift), row.queries) - 1;
    write_seen(low, high, places[segment], warp_counts[0]);
  }
  if (segment == 0 && (count == 1 || plan.keeps_live)) {
    write_seen(row.low, row.low + row.queries - 1, 0, warp_counts[1]);
  }
}

// Some blocks per row, each for some parts of it: how many of their keys each segment is the first, or the last, to see; prefix
// sums of both. And how many live keys a part has.
__global__ __launch_bounds__(kThreads) void count_kernel(const __grid_constant__ AttentionParams p,
                                                         const __grid_constant__ Plan plan) {
  wait_for_kernel_before();
  let_kernel_after_come();
  __shared__ Scan::TempStorage scratch;
  __shared__ int begun[kMostSegments], ended[kMostSegments], warp_counts[kWarps];
  const int thread = threadIdx.x;
  const int blocks = static_cast<int>(plan.count_blocks), block = static_cast<int>(blockIdx.x), row_number = block / blocks;
  const PlanRow row(p, plan, row_number);
  const SpanSource spans = spans_of_row(p, plan, row_number);
  for (int i = thread; i < row.segments; i += kThreads) begun[i] = ended[i] = 0;
  __syncthreads();
  bool has_partial = false;
  const PartsOfBlock parts(plan, block - row_number * blocks, blocks);
  for (int part = parts.first; part < parts.last; ++part) {
    const PartKeys keys(spans, part);
    has_partial |= count_keys(keys, row, begun, ended);
    const SeenKeys live(keys, row.low, row.low + row.queries - 1, warp_counts);
    if (thread == 0) plan.live[row_number * plan.parts + part] = live.all;
    __syncthreads();
  }
  has_partial = __syncthreads_or(has_partial);
  int32_t* to = plan.counts + static_cast<int64_t>(blockIdx.x) * 2 * row.segments;
  for (const int* counts : {begun, ended}) {
    int items[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) items[i] = thread * kItems + i < row.segments ? counts[thread * kItems + i] : 0;
    Scan(scratch).InclusiveSum(items, items);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (thread * kItems + i < row.segments) to[thread * kItems + i] = items[i];
    }
    to += row.segments;
    __syncthreads();
  }
  if (thread == 0) plan.partial[blockIdx.x] = has_partial;
  if (blockIdx.x == 0 && thread == 0) *plan.ticket = *plan.row_flags = 0;
}

// What a block that chooses keeps in mind.
struct Choice {
  Scan::TempStorage scratch;
  int begun[kMostSegments], ended[kMostSegments];  // keys whose first / last segment is this or one before
  int64_t entries[kLevels];                        // of all lists, by how much longer than the shortest segments are
};

// By one block: the length of a row's segments, as a shift, and where the list of each goes.
__device__ __forceinline__ void choose_lists(const AttentionParams& p, const Plan& plan, int row_number, Choice& choice) {
  int *const begun = choice.begun, *const ended = choice.ended;
  const int64_t* const entries = choice.entries;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int blocks = static_cast<int>(plan.count_blocks), key_length = static_cast<int>(p.key_length);
  const PlanRow row(p, plan, row_number);
  for (int i = thread; i < row.segments; i += kThreads) begun[i] = ended[i] = 0;
  __syncthreads();
  for (int item = thread; item < blocks * row.segments; item += kThreads) {
    const int segment = item % row.segments;
    const int32_t* const counts = row.counts + item / row.segments * 2 * row.segments + segment;
    atomicAdd(&begun[segment], counts[0]);
    atomicAdd(&ended[segment], counts[row.segments]);
  }
  bool has_partial = thread < blocks && plan.partial[row_number * blocks + thread] != 0;
  const bool is_one = !__syncthreads_or(has_partial) && plan.joins;
  const int live = begun[row.segments - 1];
  if (warp < kLevels) {
    int64_t mine = 0;
    const int shift = row.shortest + warp, count = segments_at(row.queries, shift);
    for (int i = lane; i < count && count > 1; i += 32) mine += length_of(begun, ended, row, i, shift);
    for (int step = 16; step > 0; step /= 2) mine += __shfl_xor_sync(0xffffffffu, mine, step);
    if (lane == 0) choice.entries[warp] = mine;  // a single segment's list is that of the live keys
  }
  __syncthreads();
  int longer = 0;
  while (entries[longer] > plan.capacity - key_length) ++longer;
  // The fewer lists, the less there is to write.
  const auto segments_of = [&](int more) { return static_cast<int64_t>(segments_at(row.queries, row.shortest + more)); };
  const int least = longer;
  while (plan.lengthens && segments_of(longer) > 8 &&
         entries[longer + 1] * segments_of(least) * 16 <= entries[least] * segments_of(longer + 1) * 17) {
    ++longer;
  }
  const int shift = is_one ? kOneSegment : row.shortest + longer, count = segments_at(row.queries, shift);
  if (thread == 0) plan.shift[row_number] = shift, plan.count[row_number] = live;
  if (count == 1) {
    if (thread == 0) row.lists[0] = {0, live};
    return;
  }
  int lengths[kItems], places[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    lengths[i] = thread * kItems + i < count ? length_of(begun, ended, row, thread * kItems + i, shift) : 0;
  }
  Scan(choice.scratch).ExclusiveSum(lengths, places);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (thread * kItems + i < count) row.lists[thread * kItems + i] = {key_length + places[i], lengths[i]};
  }
}

// What a block that writes live keys keeps in mind.
struct LiveKeys {
  Span span[kPlanPart];
  int warp_counts[kWarps], before;
};

// By one block: the live keys of some parts of a row behind those of the parts before, and what there is to know of each group of
// them.
__device__ __forceinline__ void write_live(const AttentionParams& p, const Plan& plan, int row_number, const PartsOfBlock& parts,
                                           LiveKeys& live) {
  constexpr int kGroup = kPlanPart / kPlanGroups;
  static_assert(kPlanGroups == kWarps && kGroup % 32 == 0);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const PlanRow row(p, plan, row_number);
  const SpanSource spans = spans_of_row(p, plan, row_number);
  const int32_t* const live_of_part = plan.live + row_number * plan.parts;
  if (thread == 0) live.before = 0;
  __syncthreads();
  int before = 0;
  for (int part = thread; part < parts.first; part += kThreads) before += live_of_part[part];
  if (before > 0) atomicAdd(&live.before, before);
  __syncthreads();
  before = live.before;
  for (int part = parts.first; part < parts.last; ++part) {
    const PartKeys keys(spans, part);
    const SeenKeys seen(keys, row.low, row.low + row.queries - 1, live.warp_counts);
    seen.for_each(keys, [&](int at, const Entry& entry) {
      live.span[at] = entry.span;
      row.write(before + at, entry);
    });
    __syncthreads();
    const int count = min(max(seen.all - warp * kGroup, 0), kGroup);
    int from = kLastPosition, to = kFirstPosition;
    for (int i = lane; i < count; i += 32) {
      const Span span = live.span[warp * kGroup + i];
      from = min(from, span.first), to = max(to, span.last);
    }
    from = __reduce_min_sync(0xffffffffu, from), to = __reduce_max_sync(0xffffffffu, to);
    if (lane == 0) plan.groups[(row_number * plan.parts + part) * kPlanGroups + warp] = {before + warp * kGroup, count, from, to};
    before += seen.all;
    __syncthreads();
  }
}

// The first blocks, one per row, choose where lists go; the others write the live keys.
__global__ __launch_bounds__(kThreads) void choose_kernel(const __grid_constant__ AttentionParams p,
                                                          const __grid_constant__ Plan plan, int rows, int live_blocks) {
  wait_for_kernel_before();
  let_kernel_after_come();
  __shared__ union Storage {
    __device__ Storage() {}
    Choice choice;
    LiveKeys live;
  } storage;
  const int block = static_cast<int>(blockIdx.x);
  if (block < rows) {
    choose_lists(p, plan, block, storage.choice);
  } else {
    const int row = (block - rows) / live_blocks;
    write_live(p, plan, row, PartsOfBlock(plan, (block - rows) % live_blocks, live_blocks), storage.live);
  }
}

// Some blocks per row, each for some segments: their lists, from the groups of live keys of which a segment may see some.
__global__ __launch_bounds__(kListThreads, 4) void list_kernel(const __grid_constant__ AttentionParams p,
                                                               const __grid_constant__ Plan plan, int blocks_of_row) {
  constexpr int kListWarps = kListThreads / 32, kLanes = kPlanPart / kPlanGroups / 32;
  wait_for_kernel_before();
  let_kernel_after_come();
  __shared__ int2 groups[kListThreads];  // places of live keys and how many, as far as the segment may see some
  __shared__ int warp_counts[2][kListWarps];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int row_number = static_cast<int>(blockIdx.x) / blocks_of_row;
  const PlanRow row(p, plan, row_number);
  const int4* const all_groups = plan.groups + row_number * plan.parts * kPlanGroups;
  const int most_groups = static_cast<int>(plan.parts) * kPlanGroups;
  const auto group_at = [&](int which) { return which < most_groups ? all_groups[which] : int4{0, 0, 0, 0}; };
  const int4 first_group = group_at(thread);  // asked for before it is known whether there is a list: both take their time
  const int shift = plan.shift[row_number], count = segments_at(row.queries, shift);
  if (count == 1) return;
  int turn = 0;
  // How many of something come before this warp's and in all.
  const auto sum_over_warps = [&](int in_warp, int& before) {
    turn ^= 1;
    if (lane == 0) warp_counts[turn][warp] = in_warp;
    __syncthreads();
    const int of_lane = lane < kListWarps ? warp_counts[turn][lane] : 0;
    before = __reduce_add_sync(0xffffffffu, lane < warp ? of_lane : 0);
    return __reduce_add_sync(0xffffffffu, of_lane);
  };
  for (int segment = static_cast<int>(blockIdx.x) - row_number * blocks_of_row; segment < count; segment += blocks_of_row) {
    const int low = row.low + first_query_of(segment, shift),
              high = row.low + min(first_query_of(segment + 1, shift), row.queries) - 1;
    int place = row.lists[segment].x;
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
        const int32_t* const index = row.index + from.x + lane;
        const int2* const span = row.span + from.x + lane;
        Entry entry[kLanes];
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          const bool is_there = i * 32 + lane < from.y;
          entry[i].span = is_there ? Span::of(span[i * 32]) : Span::empty();
          entry[i].key = is_there ? index[i * 32] : 0;
        }
        unsigned seen[kLanes];
        int in_warp = 0;
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          seen[i] = __ballot_sync(0xffffffffu, entry[i].span.touches(low, high));
          in_warp += __popc(seen[i]);
        }
        int at;
        const int all = sum_over_warps(in_warp, at);
        at += place, place += all;
#pragma unroll
        for (int i = 0; i < kLanes; ++i) {
          if (seen[i] >> lane & 1) row.write(at + __popc(seen[i] & lanes_before()), entry[i]);
          at += __popc(seen[i]);
        }
      }
      __syncthreads();
    }
  }
}

// Copies the keys and values of a kv head's list, kPackedPlaces at a time; few blocks, because often there is nothing to do.
constexpr int kPackedPlaces = 16, kPackBlocks = 64, kPackThreads = 256;
__global__ __launch_bounds__(kPackThreads) void pack_rows_kernel(const __grid_constant__ ForwardCall call) {
  wait_for_kernel_before();
  let_kernel_after_come();
  const AttentionParams& p = call.p;
  const Plan& plan = call.plan;
  const int thread = static_cast<int>(threadIdx.x), kv_heads = static_cast<int>(p.kv_heads),
            packed_head = static_cast<int>(blockIdx.x);
  const int batch = packed_head / kv_heads, kv_head = packed_head % kv_heads,
            head = kv_head * (static_cast<int>(p.heads) / kv_heads);
  const int64_t row = batch * plan.batch_stride + head / static_cast<int>(plan.head_divisor);
  if (!is_packed(call, row)) return;
  const int32_t* const list = plan.index + row * plan.capacity + plan.lists[row * plan.most_lists].x;
  const float* const bias = row_of<const float>(p.key_bias, batch, head);
  const int count = plan.count[row];
  // As many threads share a row as it has pieces of 16 bytes, rounded up to a power of two.
  const int key_pieces = static_cast<int>(p.head_dim) / 8, value_pieces = static_cast<int>(p.value_dim) / 8;
  const int shift = 32 - __clz(max(key_pieces, value_pieces) - 1), piece = thread & (1 << shift) - 1;
  const auto rows_of = [&](const Rows& rows) {
    return static_cast<const char*>(rows.data) + (batch * rows.batch_stride + kv_head * rows.head_stride) * 2 + piece * 16;
  };
  const char *const keys = rows_of(p.key), *const values = rows_of(p.value);
  for (int first = static_cast<int>(blockIdx.y) * kPackedPlaces; first < count; first += kPackBlocks * kPackedPlaces) {
    for (int at = first + (thread >> shift); at < min(first + kPackedPlaces, count); at += kPackThreads >> shift) {
      const int key = list[at];
      const int64_t to = packed_head * call.packed.capacity + at;
      uint4 key_piece{}, value_piece{};
      if (piece < key_pieces) key_piece = *reinterpret_cast<const uint4*>(keys + key * p.key.row_stride * 2);
      if (piece < value_pieces) value_piece = *reinterpret_cast<const uint4*>(values + key * p.value.row_stride * 2);
      if (bias && piece == 0) call.packed.key_bias[to] = bias[key];
      if (piece < key_pieces) static_cast<uint4*>(call.packed.key)[to * key_pieces + piece] = key_piece;
      if (piece < value_pieces) static_cast<uint4*>(call.packed.value)[to * value_pieces + piece] = value_piece;
    }
  }
}

// One block puts the quarter of the query tiles with the shortest lists last, longest first, so that all SMs finish together. The
// others stay as they are, head by head, so that their keys stay in L2.
__global__ __launch_bounds__(kThreads) void order_kernel(const __grid_constant__ AttentionParams p,
                                                         const __grid_constant__ Plan plan) {
  constexpr int kBuckets = kThreads;
  __shared__ int places[kBuckets], warp_counts[2][kWarps];
  __shared__ int shortest_kept;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int tiles = (static_cast<int>(p.query_length) + kQueryPadding - 1) / kQueryPadding;
  const int items = static_cast<int>(p.batch * p.heads) * tiles;
  int shift = 0;
  while ((p.mask.tiles_k >> shift) >= kBuckets) ++shift;
  const auto length_of = [&](int item) {
    const int batch_head = item / tiles, heads = static_cast<int>(p.heads);
    const int row = (tiles - 1 - item % tiles) * kQueryPadding / static_cast<int>(p.mask.tile_q);
    const int32_t* const rows = TileSource(p.mask, batch_head / heads, batch_head % heads).rows;
    return min(max(rows[row * (p.mask.tiles_k + 1)], 0), static_cast<int>(p.mask.tiles_k)) >> shift;
  };

  // How many tiles have each length; which lengths make up the shortest quarter; where each of those begins.
  places[thread] = 0;
  __syncthreads();
  for (int item = thread; item < items; item += kThreads) atomicAdd(&places[length_of(item)], 1);
  __syncthreads();
  if (thread == 0) {
    int shorter = 0, length = 0;
    for (; length < kBuckets && shorter + places[length] <= items / 4; ++length) {
      const int count = places[length];
      shorter += count;
      places[length] = items - shorter;
    }
    shortest_kept = length;
  }
  __syncthreads();

  int kept = 0;
  for (int base = 0, turn = 0; base < items; base += kThreads, turn ^= 1) {
    const int item = base + thread, length = item < items ? length_of(item) : 0;
    const bool keeps = item < items && length >= shortest_kept;
    const unsigned keepers = __ballot_sync(0xffffffffu, keeps);
    if (lane == 0) warp_counts[turn][warp] = __popc(keepers);
    __syncthreads();
    int place = kept;
    for (int w = 0; w < kWarps; ++w) {
      place += w < warp ? warp_counts[turn][w] : 0;
      kept += warp_counts[turn][w];
    }
    if (keeps) plan.order[place + __popc(keepers & lanes_before())] = item;
    if (!keeps && item < items) plan.order[atomicAdd(&places[length], 1)] = item;
  }
}

}  // namespace

cudaError_t launch_pack_rows(const ForwardCall& call, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(call.p.batch * call.p.kv_heads), kPackBlocks);
  return launch_dependent(pack_rows_kernel, grid, kPackThreads, 0, stream, call);
}

cudaError_t launch_order(const AttentionParams& p, const Plan& plan, cudaStream_t stream) {
  order_kernel<<<1, kThreads, 0, stream>>>(p, plan);
  return cudaGetLastError();
}

cudaError_t launch_plan(const AttentionParams& p, const Plan& plan, cudaStream_t stream) {
  const unsigned rows = static_cast<unsigned>(plan.batches * plan.heads), parts = static_cast<unsigned>(plan.parts);
  const int segments = segments_at(static_cast<int>(p.query_length), plan.shortest);
  if (parts == 1 && segments <= kFewSegments) {
    return launch_dependent(small_plan_kernel, dim3(rows, static_cast<unsigned>(segments)), kThreads, 0, stream, p, plan);
  }
  const unsigned live_blocks = static_cast<unsigned>(blocks_per_row(plan.parts, rows, rows));
  cudaError_t status =
      launch_dependent(count_kernel, rows * static_cast<unsigned>(plan.count_blocks), kThreads, 0, stream, p, plan);
  if (status == cudaSuccess) {
    status = launch_dependent(choose_kernel, rows + rows * live_blocks, kThreads, 0, stream, p, plan, static_cast<int>(rows),
                              static_cast<int>(live_blocks));
  }
  if (status == cudaSuccess && segments > 1) {
    // As many as find place at once on an H200, and at least one for two of the shortest segments, which are often joined.
    const int blocks = std::clamp(512 / static_cast<int>(rows), (segments + 1) / 2, segments);
    status = launch_dependent(list_kernel, rows * static_cast<unsigned>(blocks), kListThreads, 0, stream, p, plan, blocks);
  }
  return status;
}

}  // namespace dmattn::cuda
