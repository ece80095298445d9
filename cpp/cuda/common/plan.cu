// The plan of a call with intervals: for each segment of the queries the keys that some of them see, in key order.
//
// The one surprise is how the segments' length is found, and everything's place: prefix sums of keys by the segment that first
// sees them and by the last that does give, part by part of the keys, the length of every list at every length of segments.
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>

#include "../attention_launch.h"
#include "dependent_launch.cuh"
#include "device.cuh"
#include "packed.cuh"
#include "visibility.cuh"

namespace dmattn::cuda {
namespace {

constexpr int kWarps = 32, kThreads = kWarps * 32, kListWarps = 16, kKeysPerLane = 4;
constexpr int kItems = kMostSegments / kThreads;
static_assert(kThreads * kKeysPerLane == kPlanPart);
using Scan = cub::BlockScan<int, kThreads>;

static_assert(kOneSegment + kCoarseShift < 31);
constexpr int segments_at(int queries, int shift) { return (queries + (1 << shift) - 1) >> shift; }

struct Entry {
  int key;
  Span span;
};

// A row of the plan.
struct PlanRow {
  int32_t *index, *first, *last;
  int2* lists;
  int low, queries;        // the position of the first query
  int shortest, segments;  // the shortest segments, and how many they are
  const int32_t* counts;   // [parts, 2, segments]

  __device__ __forceinline__ PlanRow(const AttentionParams& p, const Plan& plan, int64_t row)
      : index(plan.index + row * plan.capacity),
        first(plan.first + row * plan.capacity),
        last(plan.last + row * plan.capacity),
        lists(reinterpret_cast<int2*>(plan.lists) + row * plan.most_lists),
        low(static_cast<int>(p.key_length - p.query_length)),
        queries(static_cast<int>(p.query_length)),
        shortest(plan.shortest),
        segments(segments_at(queries, shortest)),
        counts(plan.counts + row * plan.parts * 2 * segments) {}

  __device__ __forceinline__ void write(int at, const Entry& entry) const {
    index[at] = entry.key;
    first[at] = entry.span.first, last[at] = entry.span.last;
  }
  __device__ __forceinline__ Entry read(int at) const { return {index[at], {first[at], last[at]}}; }
};

// How many keys a segment of 2^shift queries sees, by prefix sums over segments of the shortest kind.
__device__ __forceinline__ int length_of(const int* begun, const int* ended, const PlanRow& row, int segment, int shift) {
  const int from = segment << shift - row.shortest, to = min(segment + 1 << shift - row.shortest, row.segments);
  return begun[to - 1] - (from > 0 ? ended[from - 1] : 0);
}

// The keys of a block of kPlanPart keys, by thread.
struct PartKeys {
  Entry entry[kKeysPerLane];
  int64_t row;
  int part;
  __device__ __forceinline__ PartKeys(const AttentionParams& p, const Plan& plan)
      : row(blockIdx.x / plan.parts), part(static_cast<int>(blockIdx.x % plan.parts)) {
    const int batch = static_cast<int>(row / plan.heads), head = static_cast<int>(row % plan.heads * plan.head_divisor);
    const SpanSource spans(p.mask, static_cast<int>(p.key_length), batch, head);
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) {
      const int key = part * kPlanPart + (threadIdx.x / 32 * kKeysPerLane + i) * 32 + threadIdx.x % 32;
      entry[i] = {key, spans.of_key(key)};
    }
  }
};

// Adds one to a count for each lane that says so; those of `common` at once, because equal addresses take turns.
__device__ __forceinline__ void add_one(int* counts, int which, int common, bool is_wanted) {
  const unsigned together = __ballot_sync(0xffffffffu, is_wanted && which == common);
  if (threadIdx.x % 32 == 0 && together) atomicAdd(&counts[common], __popc(together));
  if (is_wanted && which != common) atomicAdd(&counts[which], 1);
}

// How many of a block's keys each segment is the first, or the last, to see. True when some of them are seen by a part of the
// queries only.
__device__ __forceinline__ bool count_keys(const PartKeys& keys, const PlanRow& row, int* begun, int* ended) {
  const int high = row.low + row.queries - 1;
  for (int i = threadIdx.x; i < row.segments; i += kThreads) begun[i] = ended[i] = 0;
  __syncthreads();
  bool has_partial = false;
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i) {
    const Span span = keys.entry[i].span;
    const bool is_live = span.touches(row.low, high);
    has_partial |= is_live && !span.covers(row.low, high);
    const int first = max(span.first - row.low, 0) >> row.shortest;
    const int last = min(span.last - 1 - row.low, row.queries - 1) >> row.shortest;
    // Neighbouring keys mostly begin together, and end with them or never.
    const int common = __shfl_sync(0xffffffffu, first, 0);
    add_one(begun, first, common, is_live);
    add_one(ended, last, common, is_live && last < row.segments - 1);
    add_one(ended, last, row.segments - 1, is_live && last == row.segments - 1);
  }
  return __syncthreads_or(has_partial);
}

// Writes those of a block's keys that positions [low, high] see from `place` on, in order; `turn` changes with every call.
__device__ __forceinline__ void write_seen(const PartKeys& keys, const PlanRow& row, int low, int high, int place, int turn,
                                           int (&warp_counts)[2][kWarps]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned seen[kKeysPerLane];
  int in_warp = 0;
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i) {
    seen[i] = __ballot_sync(0xffffffffu, keys.entry[i].span.touches(low, high));
    in_warp += __popc(seen[i]);
  }
  if (lane == 0) warp_counts[turn % 2][warp] = in_warp;
  __syncthreads();
  place += __reduce_add_sync(0xffffffffu, lane < warp ? warp_counts[turn % 2][lane] : 0);
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i) {
    if (seen[i] >> lane & 1) row.write(place + __popc(seen[i] & lanes_before()), keys.entry[i]);
    place += __popc(seen[i]);
  }
}

// Where few of a block's keys are seen by anyone, as where most die soon, those are kept close together in `few`, in order, and
// each list is the work of one warp. Returns how many they are; beyond kThreads there is no room for them.
__device__ __forceinline__ int keep_few(const PartKeys& keys, const PlanRow& row, Entry (&few)[kThreads],
                                        int (&warp_counts)[kWarps]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  unsigned live[kKeysPerLane];
  int in_warp = 0;
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i) {
    live[i] = __ballot_sync(0xffffffffu, keys.entry[i].span.touches(row.low, row.low + row.queries - 1));
    in_warp += __popc(live[i]);
  }
  if (lane == 0) warp_counts[warp] = in_warp;
  __syncthreads();
  const int of_warp = warp_counts[lane], all = __reduce_add_sync(0xffffffffu, of_warp);
  int place = __reduce_add_sync(0xffffffffu, lane < warp ? of_warp : 0);
  if (all > kThreads) return all;
#pragma unroll
  for (int i = 0; i < kKeysPerLane; ++i) {
    if (live[i] >> lane & 1) few[place + __popc(live[i] & lanes_before())] = keys.entry[i];
    place += __popc(live[i]);
  }
  return all;
}

// By one warp: those of `few` that positions [low, high] see.
__device__ __forceinline__ void write_few(const Entry* few, int count, const PlanRow& row, int low, int high, int place) {
  const int lane = threadIdx.x % 32;
  for (int base = 0; base < count; base += 32) {
    const Entry entry = base + lane < count ? few[base + lane] : Entry{0, Span::empty()};
    const unsigned seen = __ballot_sync(0xffffffffu, entry.span.touches(low, high));
    if (seen >> lane & 1) row.write(place + __popc(seen & lanes_before()), entry);
    place += __popc(seen);
  }
}

// The whole plan where the keys of a row are one part and its segments no more than a warp's lanes: a block per row and segment
// counts for itself and makes that list from the keys, so there are no coarse ones.
constexpr int kFewSegments = 32;
__global__ __launch_bounds__(kThreads) void small_plan_kernel(const __grid_constant__ AttentionParams p,
                                                              const __grid_constant__ Plan plan) {
  wait_for_kernel_before();
  let_kernel_after_come();
  __shared__ int begun[kFewSegments], ended[kFewSegments], places[kFewSegments], warp_counts[2][kWarps];
  __shared__ int chosen_shift;
  const int lane = threadIdx.x % 32;
  const PartKeys keys(p, plan);
  const PlanRow row(p, plan, keys.row);
  const bool is_one = !count_keys(keys, row, begun, ended) && plan.joins;
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
      if (lane == 0) plan.shift[keys.row] = shift, plan.count[keys.row] = live;
      if (lane == 0 && keys.row == 0) *plan.ticket = 0;
    }
  }
  __syncthreads();
  const int shift = chosen_shift, count = segments_at(row.queries, shift);
  const int segment = static_cast<int>(blockIdx.y);
  if (count > 1 && segment < count) {
    const int low = row.low + (segment << shift), high = row.low + min((segment + 1) << shift, row.queries) - 1;
    write_seen(keys, row, low, high, places[segment], 0, warp_counts);
  }
  if (segment == 0 && (count == 1 || plan.keeps_live)) {
    write_seen(keys, row, row.low, row.low + row.queries - 1, 0, 1, warp_counts);
  }
}

// One block per part of a row: how many of its keys each segment is the first, or the last, to see; prefix sums of both.
__global__ __launch_bounds__(kThreads) void count_kernel(const __grid_constant__ AttentionParams p,
                                                         const __grid_constant__ Plan plan) {
  wait_for_kernel_before();
  let_kernel_after_come();
  __shared__ Scan::TempStorage scratch;
  __shared__ int begun[kMostSegments], ended[kMostSegments];
  const int thread = threadIdx.x;
  const PartKeys keys(p, plan);
  const PlanRow row(p, plan, keys.row);
  const bool has_partial = count_keys(keys, row, begun, ended);
  if (thread == 0) plan.partial[keys.row * plan.parts + keys.part] = has_partial;
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
  if (blockIdx.x == 0 && thread == 0) *plan.ticket = 0;
}

struct ChoiceStorage {
  using Sum = cub::BlockReduce<int64_t, kThreads>;
  union {
    Scan::TempStorage scan;
    Sum::TempStorage sum;
  } scratch;
  int begun[kMostSegments], ended[kMostSegments];  // keys whose first / last segment is this or one before
  int64_t needed;
};

// The length of a row's segments, as a shift, and where the list of each goes. Every block of a row finds out for itself, and one
// of them writes it down for the kernels to come.
__device__ __forceinline__ int choose_lists(const AttentionParams& p, const Plan& plan, const PlanRow& row, int64_t row_number,
                                            bool writes, ChoiceStorage& storage, int* coarse_places) {
  using Sum = ChoiceStorage::Sum;
  auto& scratch = storage.scratch;
  int *const begun = storage.begun, *const ended = storage.ended;
  const int thread = threadIdx.x, key_length = static_cast<int>(p.key_length);
  for (int i = thread; i < row.segments; i += kThreads) {
    int begun_here = 0, ended_here = 0;
    for (int part = 0; part < plan.parts; ++part) {
      begun_here += row.counts[part * 2 * row.segments + i];
      ended_here += row.counts[(part * 2 + 1) * row.segments + i];
    }
    begun[i] = begun_here, ended[i] = ended_here;
  }
  __syncthreads();
  const int live = begun[row.segments - 1];
  const auto entries_at = [&](int shift) {  // a single segment's list is that of the live keys
    const int count = segments_at(row.queries, shift);
    int64_t mine = 0;
    for (int i = thread; i < count && count > 1; i += kThreads) mine += length_of(begun, ended, row, i, shift);
    const int64_t all = Sum(scratch.sum).Sum(mine);
    if (thread == 0) storage.needed = all;
    __syncthreads();
    const int64_t result = storage.needed;
    __syncthreads();
    return result;
  };
  bool has_partial = false;
  for (int part = thread; part < plan.parts; part += kThreads) has_partial |= plan.partial[row_number * plan.parts + part] != 0;
  int shift = !__syncthreads_or(has_partial) && plan.joins ? kOneSegment : row.shortest;
  while (entries_at(shift) + entries_at(shift + kCoarseShift) > plan.capacity - key_length) ++shift;
  if (writes && thread == 0) plan.shift[row_number] = shift, plan.count[row_number] = live;

  int2* lists = row.lists;
  int begin = key_length;
  for (const int which : {shift, shift + kCoarseShift}) {
    const int count = segments_at(row.queries, which);
    int lengths[kItems], places[kItems], total;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      lengths[i] = thread * kItems + i < count ? length_of(begun, ended, row, thread * kItems + i, which) : 0;
    }
    Scan(scratch.scan).ExclusiveSum(lengths, places, total);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int segment = thread * kItems + i;
      if (segment >= count) continue;
      if (writes) lists[segment] = count == 1 ? int2{0, live} : int2{begin + places[i], lengths[i]};
      if (which != shift) coarse_places[segment] = begin + places[i];
    }
    begin += count == 1 ? 0 : total;
    lists += row.segments;
  }
  return shift;
}

// Where a row has so many parts that it pays to choose once: one block per row.
constexpr int kManyParts = 16;
__global__ __launch_bounds__(kThreads) void choose_kernel(const __grid_constant__ AttentionParams p,
                                                          const __grid_constant__ Plan plan) {
  wait_for_kernel_before();
  __shared__ ChoiceStorage storage;
  __shared__ int coarse_places[kMostSegments >> kCoarseShift];
  choose_lists(p, plan, PlanRow(p, plan, blockIdx.x), blockIdx.x, true, storage, coarse_places);
}

// One block per part of a row: writes its share of the coarse segments' lists, and of the live keys' where someone reads that.
__global__ __launch_bounds__(kThreads) void spread_kernel(const __grid_constant__ AttentionParams p,
                                                          const __grid_constant__ Plan plan) {
  wait_for_kernel_before();
  let_kernel_after_come();
  __shared__ ChoiceStorage storage;
  __shared__ Entry few[kThreads];
  __shared__ int live_counts[kWarps], warp_counts[2][kWarps];
  __shared__ int places[kMostSegments >> kCoarseShift], lengths[kMostSegments >> kCoarseShift];
  const int thread = threadIdx.x;
  const PartKeys keys(p, plan);
  const PlanRow row(p, plan, keys.row);
  const int live = keep_few(keys, row, few, live_counts);
  const bool is_chosen = plan.parts > kManyParts;
  const int shift =
      (is_chosen ? plan.shift[keys.row] : choose_lists(p, plan, row, keys.row, keys.part == 0, storage, places)) + kCoarseShift;
  const int count = segments_at(row.queries, shift);
  const auto counts_of = [&](int part, int segment) {
    const int32_t* const counts = row.counts + part * 2 * row.segments;
    return length_of(counts, counts + row.segments, row, segment, shift);
  };
  for (int i = thread; i < count; i += kThreads) {
    if (is_chosen) places[i] = row.lists[row.segments + i].x;
    lengths[i] = counts_of(keys.part, i);
  }
  __syncthreads();
  for (int i = thread; i < keys.part * count; i += kThreads) atomicAdd(&places[i % count], counts_of(i / count, i % count));
  __syncthreads();

  const int all_low = row.low, all_high = row.low + row.queries - 1;
  const auto low_of = [&](int i) { return row.low + (i << shift); };
  const auto high_of = [&](int i) { return row.low + min((i + 1) << shift, row.queries) - 1; };
  const bool writes_all = count == 1 || plan.keeps_live;
  int all_place = 0;
  for (int part = 0; part < keys.part && writes_all; ++part) all_place += row.counts[(part * 2 + 1) * row.segments - 1];
  if (live <= kThreads) {
    const int first = count > 1 ? 0 : count;  // list `count` is that of all
    for (int i = first + thread / 32; i < count + writes_all; i += kWarps) {
      if (i == count) {
        write_few(few, live, row, all_low, all_high, all_place);
      } else if (lengths[i] > 0) {
        write_few(few, live, row, low_of(i), high_of(i), places[i]);
      }
    }
    return;
  }
  int turn = 0;
  for (int i = 0; i < count && count > 1; ++i) {
    if (lengths[i] > 0) write_seen(keys, row, low_of(i), high_of(i), places[i], turn++, warp_counts);
  }
  if (writes_all) write_seen(keys, row, all_low, all_high, all_place, turn, warp_counts);
}

// One block per segment: its list, from that of the coarse segment it lies in.
__global__ __launch_bounds__(kListWarps * 32) void list_kernel(const __grid_constant__ AttentionParams p,
                                                               const __grid_constant__ Plan plan) {
  wait_for_kernel_before();
  let_kernel_after_come();
  constexpr int kRound = kListWarps * 32 * kKeysPerLane;
  __shared__ int warp_counts[2][kListWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int segments = segments_at(static_cast<int>(p.query_length), plan.shortest);
  const int64_t row_number = blockIdx.x / segments;
  const int segment = static_cast<int>(blockIdx.x % segments), shift = plan.shift[row_number];
  const PlanRow row(p, plan, row_number);
  const int count = segments_at(row.queries, shift);
  if (count == 1 || segment >= count) return;
  const int2 source = row.lists[segments + (segment >> kCoarseShift)];
  const int low = row.low + (segment << shift), high = row.low + min((segment + 1) << shift, row.queries) - 1;

  Entry coming[kKeysPerLane];
  const auto fetch = [&](int base) {  // a round ahead, so that the latency is hidden
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) {
      const int at = base + (warp * kKeysPerLane + i) * 32 + lane;
      coming[i] = at < source.y ? row.read(source.x + at) : Entry{0, Span::empty()};
    }
  };
  fetch(0);
  int place = row.lists[segment].x;
  for (int base = 0, turn = 0; base < source.y; base += kRound, turn ^= 1) {
    Entry entry[kKeysPerLane];
    unsigned seen[kKeysPerLane];
    int in_warp = 0;
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) {
      entry[i] = coming[i];
      seen[i] = __ballot_sync(0xffffffffu, entry[i].span.touches(low, high));
      in_warp += __popc(seen[i]);
    }
    if (lane == 0) warp_counts[turn][warp] = in_warp;
    fetch(base + kRound);
    __syncthreads();
    const int of_lane = lane < kListWarps ? warp_counts[turn][lane] : 0;
    int at = place + __reduce_add_sync(0xffffffffu, lane < warp ? of_lane : 0);
    place += __reduce_add_sync(0xffffffffu, of_lane);
#pragma unroll
    for (int i = 0; i < kKeysPerLane; ++i) {
      if (seen[i] >> lane & 1) row.write(at + __popc(seen[i] & lanes_before()), entry[i]);
      at += __popc(seen[i]);
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
  const int64_t kv_heads = p.kv_heads, batch = blockIdx.x / kv_heads, kv_head = blockIdx.x % kv_heads;
  const int64_t head = kv_head * (p.heads / kv_heads), row = batch * plan.batch_stride + head / plan.head_divisor;
  if (!is_packed(call, row)) return;
  const int32_t* const list = plan.index + row * plan.capacity + plan.lists[row * plan.most_lists * 2];
  const float* const bias = row_of<const float>(p.key_bias, static_cast<int>(batch), static_cast<int>(head));
  for (int first = static_cast<int>(blockIdx.y) * kPackedPlaces; first < plan.count[row]; first += kPackBlocks * kPackedPlaces) {
    const int places = min(kPackedPlaces, plan.count[row] - first);
    const int32_t* const keys = list + first;
    const int64_t packed_row = blockIdx.x * call.packed.capacity + first;
    const auto copy = [&](const Rows& rows, int64_t width, void* to) {
      const int pieces = static_cast<int>(width) / 8;  // of 16 bytes
      const char* const from = static_cast<const char*>(rows.data) + (batch * rows.batch_stride + kv_head * rows.head_stride) * 2;
      uint4* const target = static_cast<uint4*>(to) + packed_row * pieces;
      for (int i = static_cast<int>(threadIdx.x); i < places * pieces; i += kPackThreads) {
        target[i] = *reinterpret_cast<const uint4*>(from + keys[i / pieces] * rows.row_stride * 2 + i % pieces * 16);
      }
    };
    copy(p.key, p.head_dim, call.packed.key);
    copy(p.value, p.value_dim, call.packed.value);
    if (bias && threadIdx.x < places) call.packed.key_bias[packed_row + threadIdx.x] = bias[keys[threadIdx.x]];
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
  cudaError_t status = launch_dependent(count_kernel, rows * parts, kThreads, 0, stream, p, plan);
  if (status == cudaSuccess && plan.parts > kManyParts) {
    status = launch_dependent(choose_kernel, rows, kThreads, 0, stream, p, plan);
  }
  if (status == cudaSuccess) status = launch_dependent(spread_kernel, rows * parts, kThreads, 0, stream, p, plan);
  if (status == cudaSuccess && segments > 1) {
    status = launch_dependent(list_kernel, rows * segments, kListWarps * 32, 0, stream, p, plan);
  }
  return status;
}

}  // namespace dmattn::cuda
