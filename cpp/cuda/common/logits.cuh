// From a product <q, k> to a logit, and the weights that dropout keeps: what forward and backward do with each score.
//
// tanh is made of an exponential and a division, but where the time of every instruction counts: to_tanh.
#pragma once

#include "device.cuh"
#include "visibility.cuh"

namespace dmattn::cuda {

// Of a small x the difference would leave too little, so it takes two terms of its series.
__device__ __forceinline__ float tanh_by_exp(float x) {
  const float series = fmaf(x * x * (-1.0f / 3.0f), x, x);
  return fabsf(x) < 0.02f ? series : 1.0f - __fdividef(2.0f, 1.0f + exp2_approx(x * (2.0f * kLog2e)));
}

// x -> softcap * tanh(x / softcap), for a softcap > 0.
struct LogitCap {
  float softcap, inverse;
  __device__ __forceinline__ explicit LogitCap(double cap)
      : softcap(static_cast<float>(cap)), inverse(softcap > 0.0f ? 1.0f / softcap : 0.0f) {}
  __device__ __forceinline__ float operator()(float x) const { return softcap * tanh_by_exp(x * inverse); }
};

// Scores x become tanh(x * scale). The hardware's approximation is right to 2^-11 of the result: 16-bit logits are rounded to
// 2^-9 or 2^-12 of theirs, several times.
template <int kN>
__device__ __forceinline__ void to_tanh(float (&scores)[kN][4], float scale) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm("tanh.approx.f32 %0, %1;" : "=f"(scores[i][e]) : "f"(scores[i][e] * scale));
  }
}

// The exponent in base 2 of a logit's probability, in a row whose lse may be huge. So lse is subtracted before the product with
// log2(e), and what rounding left out of lse after it. The exponent is never above 0, although rounding may make a huge logit
// larger than it was in forward. NaN stays NaN.
__device__ __forceinline__ float probability_exponent(float logit, float lse, float lse_rest2) {
  const float exponent = fmaf(logit - lse, kLog2e, -lse_rest2);
  return exponent > 0.0f ? 0.0f : exponent;
}

// What makes logits of the products of one head. T is the element type of query.
template <class T>
struct LogitTerms {
  float scale, softcap, inverse_softcap;
  const void* bias;  // [Sq, Sk] of this head, or null
  int64_t bias_row_stride;
  bool bias_is_float;
  int key_length;

  __device__ __forceinline__ LogitTerms(const AttentionParams& p, int batch, int head)
      : scale(static_cast<float>(p.scale)),
        softcap(static_cast<float>(p.softcap)),
        inverse_softcap(softcap > 0.0f ? 1.0f / softcap : 0.0f),
        bias(nullptr),
        bias_row_stride(p.bias_row_stride),
        bias_is_float(p.bias_dtype == DType::kFloat32),
        key_length(static_cast<int>(p.key_length)) {
    if (!p.bias.data) return;
    if (bias_is_float) {
      bias = row_of<const float>(p.bias, batch, head);
    } else {
      bias = row_of<const T>(p.bias, batch, head);
    }
  }

  // The product, scaled and capped.
  __device__ __forceinline__ float capped(float product) const {
    const float x = product * scale;
    return softcap > 0.0f ? softcap * tanh_by_exp(x * inverse_softcap) : x;
  }
  // The derivative of capped by scale * product; 1 without a softcap.
  __device__ __forceinline__ float slope(float capped) const {
    const float t = capped * inverse_softcap;
    return 1.0f - t * t;
  }
  __device__ __forceinline__ float bias_at(int query, int key, int query_length) const {
    if (!bias || query >= query_length || key < 0 || key >= key_length) return 0.0f;
    const int64_t at = query * bias_row_stride + key;
    return bias_is_float ? static_cast<const float*>(bias)[at] : Element<T>::widen(static_cast<const T*>(bias)[at]);
  }
};

struct Dropout {
  uint64_t seed;
  uint32_t batch_head, threshold;
  float keep_scale;  // 1 / (1 - p)

  __device__ __forceinline__ Dropout(const AttentionParams& p, int batch, int head)
      : seed(p.dropout_seed ? static_cast<uint64_t>(*p.dropout_seed) : 0),
        batch_head(static_cast<uint32_t>(batch * p.heads + head)),
        threshold(p.dropout_seed ? dropout_threshold(p.dropout_p) : 0),
        keep_scale(p.dropout_seed ? static_cast<float>(1.0 / (1.0 - p.dropout_p)) : 1.0f) {}

  __device__ __forceinline__ bool is_on() const { return threshold != 0; }
  __device__ __forceinline__ uint32_t row_key(int query) const {
    return dropout_row_key(seed, batch_head, static_cast<uint32_t>(query));
  }
};

}  // namespace dmattn::cuda
