// Parts of a row's sums: how two are added up, a power of two of them, and how the sums of a row end.
#pragma once

#include "../decode_call.h"
#include "softmax.cuh"

namespace dmattn::cuda {

// The keys that a sequence has; lengths beyond the cache's capacity are cut. Past the first-level cache, because a kernel that
// was launched ahead of time may ask.
__device__ __forceinline__ int length_of(const DecodeParams& p, int batch) {
  const int capacity = static_cast<int>(p.capacity);
  if (!p.lengths) return capacity;
  const int length = __ldcg(p.lengths + batch);
  return p.lengths_are_flags && length > 0 ? capacity : max(0, min(length, capacity));
}

// The keys that a sequence has, or with lists the places of one.
__device__ __forceinline__ int keys_of(const DecodeParams& p, int batch) {
  return p.index.entries.data ? static_cast<int>(p.places) : length_of(p, batch);
}

// exp(from - to), for from <= to; sums relative to `from` become relative to `to`. 0 without a logit.
__device__ __forceinline__ float rebase(float from, float to) {
  return from == negative_infinity() ? 0.0f : exp2_approx((from - to) * kLog2e);
}

inline constexpr float kBadPage = -1.0f;  // in place of a sum of weights: one of the page numbers is out of range

// What some neighbouring keys add to a row: their sum of weights relative to a maximum, and four columns of weighted values.
struct Part {
  float2 sums;  // maximum, sum; a sum of 0: the row sees none of the keys, and values may be anything
  float4 values;

  static __device__ __forceinline__ Part nothing() { return {{negative_infinity(), 0.0f}, {}}; }
};

// How two sums are added up, of which `late` has the later keys. Where the other has nothing the result is a sum itself, bit for
// bit.
struct MergeFactors {
  float top, early, late;
  __device__ __forceinline__ MergeFactors(float2 early_sums, float2 late_sums) {
    const float early_top = early_sums.y == 0.0f ? negative_infinity() : early_sums.x;
    const float late_top = late_sums.y == 0.0f ? negative_infinity() : late_sums.x;
    top = fmaxf(early_top, late_top), early = factor_of(early_sums, top), late = factor_of(late_sums, top);
  }
  // Weights without a maximum are all NaN, and stay so.
  static __device__ __forceinline__ float factor_of(float2 sums, float top) {
    if (sums.y == 0.0f) return 0.0f;
    return sums.x == negative_infinity() ? 1.0f : exp2_approx((sums.x - top) * kLog2e);
  }
  // A sum of nothing may hold NaN.
  __device__ __forceinline__ float add(float x, float y) const {
    const float first = early == 0.0f ? 0.0f : x * early;
    return late == 0.0f ? first : fmaf(y, late, first);
  }
  __device__ __forceinline__ float2 merged(float2 early_sums, float2 late_sums) const {
    const bool is_bad = early_sums.y == kBadPage || late_sums.y == kBadPage;
    return {top, is_bad ? kBadPage : add(early_sums.y, late_sums.y)};
  }
};

__device__ __forceinline__ Part merge(const Part& early, const Part& late) {
  const MergeFactors f(early.sums, late.sums);
  return {f.merged(early.sums, late.sums),
          {f.add(early.values.x, late.values.x), f.add(early.values.y, late.values.y), f.add(early.values.z, late.values.z),
           f.add(early.values.w, late.values.w)}};
}

// The same for a power of two of parts, in pairs, pairs in pairs, and so on.
template <int kCount>
__device__ __forceinline__ Part merge_all(Part (&parts)[kCount]) {
  static_assert((kCount & (kCount - 1)) == 0);
#pragma unroll
  for (int step = 1; step < kCount; step *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2 * step) parts[i] = merge(parts[i], parts[i + step]);
  }
  return parts[0];
}

// Adds parts up in the same order while they come one by one: what waits for its neighbour stands in `waiting`, by the number of
// pairings that it has behind it. `count` parts came before. After the last part the sum of all is in waiting[0].
template <int kLevels>
__device__ __forceinline__ void add_part(Part (&waiting)[kLevels], int count, bool is_last, Part part) {
  int level = 0;
  for (; is_last ? (count >> level) > 0 : (count >> level) & 1; ++level) {
    if (count >> level & 1) part = merge(waiting[level], part);
  }
  waiting[is_last ? 0 : level] = part;
}

// The factor that normalises a row whose weights have this sum relative to this maximum. A sink takes weight and gives nothing;
// it may be far above every logit. 0 for a row that sees nothing and for one of which a page number is out of range.
__device__ __forceinline__ float end_factor(float maximum, float sum, const float* sink) {
  if (sum <= 0.0f) return 0.0f;
  if (!sink) return __fdividef(1.0f, sum);
  const float top = fmaxf(maximum, *sink), weight = rebase(maximum, top);
  return __fdividef(weight, fmaf(sum, weight, rebase(*sink, top)));
}

__device__ __forceinline__ float end_lse(float maximum, float sum) {
  return sum <= 0.0f ? negative_infinity() : add_log(maximum, sum).value;
}

// The place of a row of a call's head.
struct RowPlace {
  int head, query;
  __device__ __forceinline__ RowPlace(const DecodeCall& call, int call_head, int row) {
    query = row / call.group, head = row - query * call.group;
    if (call.queries_apart > 1) {
      const int heads_before = call_head / call.queries_apart;
      query += call_head - heads_before * call.queries_apart, call_head = heads_before;
    }
    head += call_head * call.group;
  }
};

// Four neighbouring elements of a row of out; what it was made of may be NaN where the factor is 0.
template <class T>
__device__ __forceinline__ void store_out(const DecodeParams& p, int batch, RowPlace place, int column, float4 x, float factor) {
  if (factor == 0.0f) x = {0.0f, 0.0f, 0.0f, 0.0f};
  char* const to = static_cast<char*>(p.out.data) +
                   (batch * p.out.batch_stride + place.head * p.out.head_stride + place.query * p.out.row_stride + column) * 2;
  *reinterpret_cast<uint2*>(to) = {Element<T>::narrow_pair(x.x * factor, x.y * factor),
                                   Element<T>::narrow_pair(x.z * factor, x.w * factor)};
}

__device__ __forceinline__ void store_lse(const DecodeParams& p, int batch, RowPlace place, float lse) {
  static_cast<float*>(p.lse)[(batch * p.heads + place.head) * p.queries + place.query] = lse;
}

__device__ __forceinline__ const float* sink_of(const DecodeParams& p, int head) {
  return p.sinks ? static_cast<const float*>(p.sinks) + head : nullptr;
}

// Normalises and writes four columns of a row of which all parts are added up; with the first columns also lse.
template <class T>
__device__ __forceinline__ void finish_row(const DecodeParams& p, int batch, RowPlace place, int column, const Part& all) {
  const float maximum = all.sums.x, sum = all.sums.y;
  store_out<T>(p, batch, place, column, all.values, end_factor(maximum, sum, sink_of(p, place.head)));
  if (column == 0) store_lse(p, batch, place, end_lse(maximum, sum));
}

}  // namespace dmattn::cuda
