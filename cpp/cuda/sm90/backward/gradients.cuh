// The gradients of a chunk's weights become gradients of its scores in the Hopper backward, and of the biases.
#pragma once

#include "weights.cuh"

namespace dmattn::cuda::sm90 {

// For instances with options: the gradients of four scores, of two keys and two queries, from those of the weights. slopes: of
// each key; delta: of each query.
template <class T>
__device__ __forceinline__ void differentiate_with_options(float (&gradients)[4], uint32_t first_slopes, uint32_t second_slopes,
                                                           float2 delta, float keep_probability, float bias_factor,
                                                           float (&bias_sum)[2]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float2 pair = Element<T>::widen_pair(e / 2 == 0 ? first_slopes : second_slopes);
    const float slope = e % 2 == 0 ? pair.x : pair.y, kept = fmaxf(slope, 0.0f) * gradients[e];
    gradients[e] = fmaf(-fabsf(slope), (e % 2 == 0 ? delta.x : delta.y) * keep_probability, kept);
    bias_sum[e / 2] = fmaf(gradients[e], bias_factor, bias_sum[e / 2]);
  }
}

// Turns gradients of the weights into gradients of the scores, and adds them to those of key_bias. kSubtracted: they are passed
// subtracted from delta. delta_of: of the thread's queries.
template <class T, class Traits, bool kSubtracted, int kEarly, int kSteps, int kN>
__device__ __forceinline__ void differentiate_scores(const BackwardCall& call, float (&grad_scores)[kN][4],
                                                     const uint32_t (&weights)[kSteps][4], const uint32_t (&slopes)[kSteps][4],
                                                     const QueryTerms<kEarly>& delta_of, float (&bias_sum)[2]) {
  constexpr bool kCaps = Traits::kLogits == Logits::kCapped && Traits::kBias != Bias::kPair;
  const bool is_apart = has_apart_bias<kCaps>(call);
  if (is_apart) {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const float2 delta = delta_of.pair(i);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 pair = Element<T>::widen_pair(weights[i / 2][i % 2 * 2 + r]);
        bias_sum[r] = fmaf(pair.x, fmaf(-delta.x, call.keep_probability, grad_scores[i][2 * r]), bias_sum[r]);
        bias_sum[r] = fmaf(pair.y, fmaf(-delta.y, call.keep_probability, grad_scores[i][2 * r + 1]), bias_sum[r]);
      }
    }
  }
  const float bias_factor = is_apart ? 0.0f : 1.0f;
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    if constexpr (Traits::kHasOptions) {
      differentiate_with_options<T>(grad_scores[i], slopes[i / 2][i % 2 * 2], slopes[i / 2][i % 2 * 2 + 1], delta_of.pair(i),
                                    call.keep_probability, bias_factor, bias_sum);
    } else {
      const float2 delta = kSubtracted ? float2{} : delta_of.pair(i);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 pair = Element<T>::widen_pair(weights[i / 2][i % 2 * 2 + e / 2]);
        const float weight = e % 2 == 0 ? pair.x : pair.y;
        grad_scores[i][e] =
            kSubtracted ? grad_scores[i][e] * -weight : (grad_scores[i][e] - (e % 2 == 0 ? delta.x : delta.y)) * weight;
        if (Traits::kBias != Bias::kNone) bias_sum[e / 2] += grad_scores[i][e];
      }
    }
  }
}

// For instances with a bias of single pairs, where differentiate_scores leaves gradients of the logits. Adds them to the gradient
// of the bias, if it is wanted. With softcap they become gradients of the scores only then.
template <class T, int kDim, class Traits, int kSteps, int kN>
__device__ __forceinline__ void differentiate_bias(const BackwardCall& call, const KeyDescriptor& tile,
                                                   const QueryDescriptor& descriptor, float (&gradients)[kN][4],
                                                   const uint32_t (&slopes)[kSteps][4], const uint32_t (&cap_slopes)[kSteps][4]) {
  if constexpr (Traits::kBias == Bias::kPair) {
    if (call.grad_bias.data) BiasOfScores<T, kDim>{call, tile, descriptor}.add_gradients(gradients, slopes);
  }
  if constexpr (Traits::kBias == Bias::kPair && Traits::kLogits == Logits::kCapped) {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 slope = Element<__half>::widen_pair(cap_slopes[i / 2][i % 2 * 2 + r]);
        gradients[i][2 * r] *= slope.x, gradients[i][2 * r + 1] *= slope.y;
      }
    }
  }
}

}  // namespace dmattn::cuda::sm90
