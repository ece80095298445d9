// How the sums of a row end: merged, normalised and, with a sink, diluted. Shared by a block that has all keys and by what merges
// splits.
#pragma once

#include "../splits.h"
#include "softmax.cuh"

namespace dmattn::cuda {

// The keys that a sequence has; lengths beyond the cache's capacity are cut. Past the first-level cache, because a kernel that
// was launched ahead of time may ask.
__device__ __forceinline__ int length_of(const DecodeParams& p, int batch) {
  const int capacity = static_cast<int>(p.capacity);
  return p.lengths ? max(0, min(__ldcg(p.lengths + batch), capacity)) : capacity;
}

// exp(from - to), for from <= to; sums relative to `from` become relative to `to`. 0 without a logit.
__device__ __forceinline__ float rebase(float from, float to) {
  return from == negative_infinity() ? 0.0f : exp2_approx((from - to) * kLog2e);
}

// The factor that normalises a row whose weights have this sum relative to this maximum. A sink takes weight and gives nothing;
// it may be far above every logit. 0 for a row that sees nothing.
__device__ __forceinline__ float end_factor(float maximum, float sum, const float* sink) {
  if (sum == 0.0f) return 0.0f;
  if (!sink) return __fdividef(1.0f, sum);
  const float top = fmaxf(maximum, *sink), weight = rebase(maximum, top);
  return __fdividef(weight, fmaf(sum, weight, rebase(*sink, top)));
}

__device__ __forceinline__ float end_lse(float maximum, float sum) {
  return sum == 0.0f ? negative_infinity() : add_log(maximum, sum).value;
}

// The place of a row of a key head.
struct RowPlace {
  int head, query;
  __device__ __forceinline__ RowPlace(const DecodeParams& p, int kv_head, int row) {
    const int group = static_cast<int>(p.heads / p.kv_heads);
    head = kv_head * group + row % group, query = row / group;
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

}  // namespace dmattn::cuda
