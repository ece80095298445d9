// For each 64 keys the first position that sees one of them, and the last. A query tile skips dead keys by it without reading
// them.
#pragma once

#include "tile.h"

namespace dmattn::cpu {
namespace {

constexpr int32_t kAlways = INT32_MIN, kForever = INT32_MAX;

// [mask batches, mask heads, blocks]: the smallest start or the largest end of 64 keys; rows are whole vectors. Null where start
// or end is not given, or where there are too few queries.
struct Summary {
  int32_t* data;
  int64_t batches, heads, blocks;
};

// The summaries of a call, in its shared memory.
struct Summaries {
  Summary start_min, end_max;
};

DMATTN_INLINE Summary take_summary(Arena& shared, const AttentionParams& p, const PerHead& view) {
  if (!view.data || p.query_length <= kUnsummedQueries) return {nullptr, 0, 0, 0};
  const int64_t batches = view.batch_stride == 0 ? 1 : p.batch, heads = view.head_stride == 0 ? 1 : p.heads / view.head_divisor;
  const int64_t blocks = round_up(ceil_div(p.key_length, kSummaryKeys), kLanes<float>);
  return {shared.take<int32_t>(batches * heads * blocks), batches, heads, blocks};
}

DMATTN_INLINE Summaries take_summaries(Arena& shared, const AttentionParams& p) {
  const Summary start_min = take_summary(shared, p, p.mask.start);
  return {start_min, take_summary(shared, p, p.mask.end)};
}

DMATTN_INLINE const int32_t* summary_row(const Summary& s, const PerHead& view, int64_t batch, int64_t head) {
  if (!s.data) return nullptr;
  return s.data + ((s.batches == 1 ? 0 : batch) * s.heads + (s.heads == 1 ? 0 : head / view.head_divisor)) * s.blocks;
}

// One task = one row of one summary.
DMATTN_INLINE int64_t summary_tasks(const Summaries& s) {
  return s.start_min.batches * s.start_min.heads + s.end_max.batches * s.end_max.heads;
}

template <bool kMax>
DMATTN_INLINE void summarise_row(const Summary& s, const PerHead& view, int64_t row, int64_t length) {
  const int32_t* from =
      static_cast<const int32_t*>(view.data) + (row / s.heads) * view.batch_stride + (row % s.heads) * view.head_stride;
  int32_t* to = s.data + row * s.blocks;
  for (int64_t block = 0; block < s.blocks; ++block) {
    int32_t best = kMax ? kAlways : kForever;
    for (int64_t j = block * kSummaryKeys; j < min_of((block + 1) * kSummaryKeys, length); ++j) {
      best = (kMax ? from[j] > best : from[j] < best) ? from[j] : best;
    }
    to[block] = best;
  }
}

void summarise(const AttentionParams& p, const Summaries& s, int64_t task) {
  const int64_t start_rows = s.start_min.batches * s.start_min.heads;
  if (task < start_rows) {
    summarise_row<false>(s.start_min, p.mask.start, task, p.key_length);
  } else {
    summarise_row<true>(s.end_max, p.mask.end, task - start_rows, p.key_length);
  }
}

}  // namespace
}  // namespace dmattn::cpu
