// What becomes of a chunk's scores in backward on Hopper: they are hidden where a mask hides them, become probabilities, and the
// gradients of the weights become theirs. With softcap, dropout and biases, too. Scores are transposed, keys by queries.
#pragma once

#include "../common/logits.cuh"
#include "backward_load.cuh"

namespace dmattn::cuda::sm90 {

// Of the thread's first score the key (row) and the query (column); its other key is row + 8. The warp's rows begin at
// first_row, the warpgroup's columns of grad_key and grad_value at first_column. Recomputed where they are needed, because
// registers are short.
template <int kDim>
struct ScorePlace {
  static constexpr int first_column = 0;
  int lane, column, row, first_row;
  __device__ __forceinline__ ScorePlace() {
    const uint32_t thread = thread_index();  // unsigned, so that the divisions are shifts
    lane = static_cast<int>(thread % 32), column = static_cast<int>(thread % 4 * 2);
    first_row = static_cast<int>(thread / 32 * 16), row = first_row + static_cast<int>(thread % 32 / 4);
  }
  // The thread's number among those that compute.
  __device__ __forceinline__ int thread() const { return first_row * 2 + lane; }
};

// The key in a row of the tile, -1 for none.
template <int kDim>
__device__ __forceinline__ int key_at(const KeyDescriptor& tile, int row) {
  return tile.index[index_place<kBackwardShape<kDim, false>.keys>(row)];
}

// Scores that spans or the bits of a block mask hide become -inf.
template <int kDim, Variant kVariant, int kN>
__device__ __forceinline__ void hide_scores(const AttentionParams& p, const KeyDescriptor& tile,
                                            const QueryDescriptor& descriptor, float (&scores)[kN][4]) {
  // Hide what spans hide.
  if (descriptor.needs_test) {
    const ScorePlace<kDim> place;
    const int position = descriptor.first_query + static_cast<int>(p.key_length - p.query_length) + place.column;
    const Seen span[2] = {tile.span[place.row], tile.span[place.row + 8]};
#pragma unroll
    for (int i = 0; i < kN; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!span[e / 2].sees(position + 8 * i + e % 2)) scores[i][e] = negative_infinity();
      }
    }
  }
  // Hide what the bits of a block mask hide.
  if (!gathers_keys(kVariant) && !is_dense(kVariant) && descriptor.bits) {
    const int words = static_cast<int>(p.mask.tile_k) / 32;
    const ScorePlace<kDim> place;
    const uint32_t* const bits = descriptor.bits + place.column * words + place.row / 32;
#pragma unroll
    for (int i = 0; i < kN; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint32_t word = bits[(8 * i + e) * words] >> (place.row % 32);
        if (!has_bit(word, 0)) scores[i][e] = negative_infinity();
        if (!has_bit(word, 8)) scores[i][2 + e] = negative_infinity();
      }
    }
  }
}

// Scores become probabilities exp(score - lse) in rows whose lse may be huge.
template <int kDim, int kN>
__device__ __forceinline__ void weigh_huge_scores(const BackwardCall& call, const KeyDescriptor& tile,
                                                  const QueryDescriptor& descriptor, float (&scores)[kN][4]) {
  const AttentionParams& p = call.b.forward;
  const ScorePlace<kDim> place;
  const int64_t terms = (tile.batch * p.heads + descriptor.head) * call.padded_queries + descriptor.first_query + place.column;
  const float* const bias = row_of<const float>(p.key_bias, tile.batch, descriptor.head);
  float bias_of[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = key_at<kDim>(tile, place.row + 8 * r);
    bias_of[r] = bias && key >= 0 ? bias[key] : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < kN; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t at = terms + 8 * i + e % 2;
      scores[i][e] = exp2_approx(
          probability_exponent(fmaf(scores[i][e], call.logit_scale, bias_of[e / 2]), call.lse[at], call.lse_rest2[at]));
    }
  }
}

// Scores become probabilities exp(score - lse). bias_2: key_bias of the thread's two keys in base 2; lse2_of: lse of the chunk's
// queries.
template <Variant kVariant, int kN>
__device__ __forceinline__ void weigh_scores(float (&scores)[kN][4], const float* lse2_of, int column, const float (&bias_2)[2],
                                             float scale_2) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    const float2 lse2 = *reinterpret_cast<const float2*>(&lse2_of[column + 8 * i]);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float minus_lse2 = -(e % 2 == 0 ? lse2.x : lse2.y);
      scores[i][e] = exp2_approx(fmaf(scores[i][e], scale_2, has_key_bias(kVariant) ? bias_2[e / 2] + minus_lse2 : minus_lse2));
    }
  }
}

// The bias [Sq, Sk] of the thread's scores, and where its gradient goes. Addresses are counted on from row to row: a product of
// 64 bits for each would take longer than all else.
template <class T, int kDim>
struct BiasOfScores {
  static constexpr BackwardShape kShape = kBackwardShape<kDim, true>;
  const BackwardCall& call;
  const KeyDescriptor& tile;
  const QueryDescriptor& descriptor;
  const ScorePlace<kDim> place;

  // Products become logits without key_bias. Keys that do not exist get some bias; they are hidden afterwards.
  template <int kN>
  __device__ __forceinline__ void add_to(float (&scores)[kN][4]) const {
    const AttentionParams& p = call.b.forward;
    if (p.bias_dtype == DType::kFloat32) {
      add_to(scores, row_of<const float>(p.bias, tile.batch, descriptor.head), [](float x) { return x; });
    } else {
      add_to(scores, row_of<const T>(p.bias, tile.batch, descriptor.head), [](T x) { return Element<T>::widen(x); });
    }
  }
  // Adds the gradients of the logits of pairs that exist and whose weight is not 0, or stores them and zeros for the others: not
  // NaN, where a hidden key is beside it.
  template <int kN, int kSteps>
  __device__ __forceinline__ void add_gradients(const float (&gradients)[kN][4], const uint32_t (&slopes)[kSteps][4]) const {
    const AttentionParams& p = call.b.forward;
    const int first_query = descriptor.first_query + place.column, first_key = tile.first_place + place.row;
    float* even = row_of<float>(call.grad_bias, tile.batch, descriptor.head) + first_query * p.key_length + first_key;
    float* odd = even + p.key_length;
    // How many queries there are from the thread's first one on; none for a key that does not exist.
    const int count = static_cast<int>(p.query_length) - first_query;
    const int queries[2] = {key_at<kDim>(tile, place.row) >= 0 ? count : 0, key_at<kDim>(tile, place.row + 8) >= 0 ? count : 0};
    const auto each = [&](const auto& put) {
#pragma unroll
      for (int i = 0; i < kN; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const bool has_weight = slopes[i / 2][i % 2 * 2 + e / 2] & (e % 2 == 0 ? 0x7fffu : 0x7fff0000u);
          float* const to = (e % 2 == 0 ? even : odd) + e / 2 * 8;  // keys are in order
          if (8 * i + e % 2 < queries[e / 2]) put(to, has_weight, gradients[i][e] * call.keep_scale);
        }
        even += 8 * p.key_length, odd += 8 * p.key_length;
      }
    };
    if (owns_bias_gradient(call)) {
      each([](float* to, bool has_weight, float gradient) { *to = has_weight ? gradient : 0.0f; });
    } else {
      each([](float* to, bool has_weight, float gradient) {
        if (has_weight) atomicAdd(to, gradient);
      });
    }
  }

 private:
  template <int kN, class Stored, class Widen>
  __device__ __forceinline__ void add_to(float (&scores)[kN][4], const Stored* bias, const Widen& widen) const {
    const AttentionParams& p = call.b.forward;
    const int last = static_cast<int>(p.query_length) - 1;
    // Bring the bias of what is likely to be the next chunk from memory into L2. Some threads share a row.
    constexpr int kQueries = kShape.queries, kThreadsPerRow = kConsumers * kWarpgroup / kQueries,
                  kKeysPerThread = kShape.keys / kThreadsPerRow;
    const int thread = place.thread();
    const int ahead = descriptor.first_query + kQueries + thread / kThreadsPerRow,
              at = tile.first_place + thread % kThreadsPerRow * kKeysPerThread;
    if (ahead <= last && at < p.key_length) prefetch_l2(bias + ahead * p.bias_row_stride + at);
    const int first_query = descriptor.first_query + place.column, first_key = tile.first_place + place.row;
    if (descriptor.first_query + kQueries <= p.query_length && tile.first_place + kShape.keys <= p.key_length) {
      const Stored* even = bias + first_query * p.bias_row_stride + first_key;
      const Stored* odd = even + p.bias_row_stride;
#pragma unroll
      for (int i = 0; i < kN; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          scores[i][e] = fmaf(scores[i][e], call.logit_scale, widen((e % 2 == 0 ? even : odd)[e / 2 * 8]));
        }
        even += 8 * p.bias_row_stride, odd += 8 * p.bias_row_stride;
      }
      return;
    }
    const int keys[2] = {max(key_at<kDim>(tile, place.row), 0), max(key_at<kDim>(tile, place.row + 8), 0)};
#pragma unroll
    for (int i = 0; i < kN; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int query = first_query + 8 * i + e % 2;
        const float x = widen(bias[min(query, last) * p.bias_row_stride + keys[e / 2]]);
        scores[i][e] = fmaf(scores[i][e], call.logit_scale, query <= last ? x : 0.0f);
      }
    }
  }
};

// Scores become tanh(score * scale), by the function that forward has where there is a bias: a tangent that is off would make
// weights larger than 1. cap_slopes: the derivative of softcap for each, in float16 whatever T is, because it is at most 1. It is
// 0 where a score is not a number; such a score is hidden later.
template <int kSteps, int kN>
__device__ __forceinline__ void cap_scores(float (&scores)[kN][4], float scale, uint32_t (&cap_slopes)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    float slopes[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float tangent = tanh_by_exp(scores[i][e] * scale);
      slopes[e] = __saturatef(fmaf(-tangent, tangent, 1.0f));
      scores[i][e] = tangent;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      cap_slopes[i / 2][i % 2 * 2 + r] = Element<__half>::narrow_pair(slopes[2 * r], slopes[2 * r + 1]);
    }
  }
}

// Is the gradient of key_bias another one than that of the scores, and wanted? With softcap the slope of tanh is no part of it.
template <bool kCaps>
__device__ __forceinline__ bool has_apart_bias(const BackwardCall& call) {
  return kCaps && call.cap_scale != 0.0f && call.grad_key_bias.data;
}

// For variants with options. scores are products or, with softcap, tangents, -inf where they are hidden. They become `weights`,
// probabilities that dropout leaves, and `slopes`, probabilities times the derivative of softcap, negative where dropout drops
// them: both as operands of products. lse2_of, delta_of, row_hash: of the chunk's queries. What the dropped pairs add to a
// gradient of key_bias of its own is added to bias_sum.
template <class T, int kDim, bool kCaps, int kSteps, int kN>
__device__ __forceinline__ void weigh_with_options(const BackwardCall& call, const KeyDescriptor& tile,
                                                   const QueryDescriptor& descriptor, const float (&scores)[kN][4],
                                                   const float* lse2_of, const float* delta_of, const uint32_t* row_hash,
                                                   const float (&bias_2)[2], bool has_huge_rows, uint32_t (&weights)[kSteps][4],
                                                   uint32_t (&slopes)[kSteps][4], float (&bias_sum)[2]) {
  const AttentionParams& p = call.b.forward;
  const int column = ScorePlace<kDim>().column;
  const float curve = kCaps && call.cap_scale != 0.0f ? -1.0f : 0.0f;
  const auto weigh = [&](auto exponent_of) {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float weight[2], slope[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float score = scores[i][2 * r + e];
          weight[e] = exp2_approx(exponent_of(score, i, r, e));
          // Hidden: 0, whatever the product.
          slope[e] = kCaps ? weight[e] * __saturatef(fmaf(score * curve, score, 1.0f)) : weight[e];
        }
        weights[i / 2][i % 2 * 2 + r] = Element<T>::narrow_pair(weight[0], weight[1]);
        slopes[i / 2][i % 2 * 2 + r] = Element<T>::narrow_pair(slope[0], slope[1]);
      }
      asm volatile("" ::: "memory");  // not all loads at once: registers are short here
    }
  };
  if (has_huge_rows) {
    const int64_t terms = (tile.batch * p.heads + descriptor.head) * call.padded_queries + descriptor.first_query + column;
    weigh([&](float score, int i, int r, int e) {
      const int64_t at = terms + 8 * i + e;
      return probability_exponent(kCaps ? fmaf(score, call.logit_scale, bias_2[r]) : score + bias_2[r], call.lse[at],
                                  call.lse_rest2[at]);
    });
  } else {
    weigh([&](float score, int i, int r, int e) {
      return fmaf(score, kCaps ? call.scale_2 : kLog2e, bias_2[r] - lse2_of[column + 8 * i + e]);
    });
  }
  // Drop weights.
  if (call.threshold != 0) {
    uint32_t key_hash[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      key_hash[r] = dropout_key_hash(static_cast<uint32_t>(key_at<kDim>(tile, ScorePlace<kDim>().row + 8 * r)));
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const uint2 hashes = *reinterpret_cast<const uint2*>(&row_hash[column + 8 * i]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t kept = (dropout_keeps_pair(hashes.x, key_hash[r], call.threshold) ? 0xffffu : 0u) |
                              (dropout_keeps_pair(hashes.y, key_hash[r], call.threshold) ? 0xffff0000u : 0u);
        if (has_apart_bias<kCaps>(call)) {
          const float2 dropped = Element<T>::widen_pair(weights[i / 2][i % 2 * 2 + r] & ~kept);
          const float2 delta = *reinterpret_cast<const float2*>(&delta_of[column + 8 * i]);
          bias_sum[r] -= fmaf(dropped.x, delta.x, dropped.y * delta.y) * call.keep_probability;
        }
        weights[i / 2][i % 2 * 2 + r] &= kept;
        slopes[i / 2][i % 2 * 2 + r] |= ~kept & 0x80008000u;
      }
    }
  }
}

// For variants with options: the gradients of four scores, of two keys and two queries, from those of the weights. slopes: of
// each key; delta: of each query.
template <class T>
__device__ __forceinline__ void differentiate_with_options(float (&gradients)[4], uint32_t first_slopes, uint32_t second_slopes,
                                                           const float* delta, float keep_probability, float bias_factor,
                                                           float (&bias_sum)[2]) {
  const float2 deltas = *reinterpret_cast<const float2*>(delta);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float2 pair = Element<T>::widen_pair(e / 2 == 0 ? first_slopes : second_slopes);
    const float slope = e % 2 == 0 ? pair.x : pair.y, kept = fmaxf(slope, 0.0f) * gradients[e];
    gradients[e] = fmaf(-fabsf(slope), (e % 2 == 0 ? deltas.x : deltas.y) * keep_probability, kept);
    bias_sum[e / 2] = fmaf(gradients[e], bias_factor, bias_sum[e / 2]);
  }
}

// Replaces each gradient of a weight by delta minus it. delta_of: of the thread's queries.
template <int kN>
__device__ __forceinline__ void subtract_from_delta(float (&grad_scores)[kN][4], const float* delta_of) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    const float2 delta = *reinterpret_cast<const float2*>(&delta_of[8 * i]);
#pragma unroll
    for (int e = 0; e < 4; ++e) grad_scores[i][e] = (e % 2 == 0 ? delta.x : delta.y) - grad_scores[i][e];
  }
}

// Turns gradients of the weights into gradients of the scores, and adds them to those of key_bias. Without options grad_scores
// is passed as delta minus the gradients of the weights. delta_of: of the thread's queries.
template <class T, Variant kVariant, int kSteps, int kN>
__device__ __forceinline__ void differentiate_scores(const BackwardCall& call, float (&grad_scores)[kN][4],
                                                     const uint32_t (&weights)[kSteps][4], const uint32_t (&slopes)[kSteps][4],
                                                     const float* delta_of, float (&bias_sum)[2]) {
  constexpr bool kCaps = may_cap(kVariant) && !has_pair_bias(kVariant);
  const bool is_apart = has_apart_bias<kCaps>(call);
  if (is_apart) {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
      const float2 delta = *reinterpret_cast<const float2*>(&delta_of[8 * i]);
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
    if constexpr (has_options(kVariant)) {
      differentiate_with_options<T>(grad_scores[i], slopes[i / 2][i % 2 * 2], slopes[i / 2][i % 2 * 2 + 1], &delta_of[8 * i],
                                    call.keep_probability, bias_factor, bias_sum);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 pair = Element<T>::widen_pair(weights[i / 2][i % 2 * 2 + e / 2]);
        grad_scores[i][e] *= -(e % 2 == 0 ? pair.x : pair.y);
        if (has_key_bias(kVariant)) bias_sum[e / 2] += grad_scores[i][e];
      }
    }
  }
}

// For variants with a bias of single pairs, where differentiate_scores leaves gradients of the logits. Adds them to the gradient
// of the bias, if it is wanted. With softcap they become gradients of the scores only then.
template <class T, int kDim, Variant kVariant, int kSteps, int kN>
__device__ __forceinline__ void differentiate_bias(const BackwardCall& call, const KeyDescriptor& tile,
                                                   const QueryDescriptor& descriptor, float (&gradients)[kN][4],
                                                   const uint32_t (&slopes)[kSteps][4], const uint32_t (&cap_slopes)[kSteps][4]) {
  if constexpr (has_pair_bias(kVariant)) {
    if (call.grad_bias.data) BiasOfScores<T, kDim>{call, tile, descriptor}.add_gradients(gradients, slopes);
  }
  if constexpr (has_pair_bias(kVariant) && may_cap(kVariant)) {
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

// key_bias of the thread's two keys in base 2; with is_natural a logit, for rows whose lse is huge. For one head.
template <int kDim>
__device__ __forceinline__ void read_key_bias(const AttentionParams& p, const KeyDescriptor& tile, int row, int head,
                                              bool is_natural, float (&bias_2)[2]) {
  const float* const bias = row_of<const float>(p.key_bias, tile.batch, head);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = key_at<kDim>(tile, row + 8 * r);
    bias_2[r] = bias && key >= 0 ? bias[key] * (is_natural ? 1.0f : kLog2e) : 0.0f;
  }
}

// Adds the gradient of key_bias for the thread's two keys and one head to global memory, and starts a new sum.
template <int kDim>
__device__ __forceinline__ void flush_bias(const BackwardCall& call, const KeyDescriptor& tile, int head, float (&bias_sum)[2]) {
  if (!call.grad_key_bias.data || head < 0) return;
  const ScorePlace<kDim> place;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = bias_sum[r] * call.keep_scale;
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int key = key_at<kDim>(tile, place.row + 8 * r);
    if (place.lane % 4 == 0 && key >= 0) atomicAdd(row_of<float>(call.grad_key_bias, tile.batch, head) + key, sum);
    bias_sum[r] = 0.0f;
  }
}

// Narrows a block of scores to operands of a product.
template <class T, int kSteps, int kN>
__device__ __forceinline__ void narrow(uint32_t (&to)[kSteps][4], const float (&from)[kN][4]) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto& four = from[2 * k + i / 2];
      to[k][i] = Element<T>::narrow_pair(four[i % 2 * 2], four[i % 2 * 2 + 1]);
    }
  }
}

// A chunk's products become weights, operands of a product; with options slopes, too, of which differentiate_scores makes the
// gradients, and with softcap beside a bias of single pairs cap_slopes, for differentiate_bias. has_test: are there scores to
// hide?
template <class T, int kDim, Variant kVariant, int kSteps, int kN>
__device__ __forceinline__ void weigh_chunk(const BackwardCall& call, BackwardShared<kDim, has_options(kVariant)>& shared,
                                            const KeyDescriptor& tile, const QueryDescriptor& descriptor, uint32_t stage,
                                            bool has_test, float (&scores)[kN][4], const float (&bias_2)[2], float (&bias_sum)[2],
                                            uint32_t (&weights)[kSteps][4], uint32_t (&slopes)[kSteps][4],
                                            uint32_t (&cap_slopes)[kSteps][4]) {
  constexpr bool kHasPairBias = has_pair_bias(kVariant);
  const bool has_huge_rows = shared.row_flags & kHugeRows;
  if constexpr (kHasPairBias) {
    if constexpr (may_cap(kVariant)) cap_scores(scores, call.cap_scale, cap_slopes);
    BiasOfScores<T, kDim>{call, tile, descriptor}.add_to(scores);
  } else if (has_options(kVariant) && call.cap_scale != 0.0f) {
    to_tangents(scores, call.cap_scale);
  }
  if (has_test) hide_scores<kDim, kVariant>(call.b.forward, tile, descriptor, scores);
  if constexpr (has_options(kVariant)) {
    weigh_with_options<T, kDim, !kHasPairBias>(call, tile, descriptor, scores, shared.lse2[stage], shared.delta[stage],
                                               shared.row_hash[stage], bias_2, has_huge_rows, weights, slopes, bias_sum);
  } else {
    if (has_key_bias(kVariant) && has_huge_rows) {
      weigh_huge_scores<kDim>(call, tile, descriptor, scores);
    } else {
      weigh_scores<kVariant>(scores, shared.lse2[stage], ScorePlace<kDim>().column, bias_2, call.scale_2);
    }
    narrow<T>(weights, scores);
  }
}

}  // namespace dmattn::cuda::sm90
