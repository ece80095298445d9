// The scores of a chunk become probabilities in the Hopper backward, with masks, softcap, dropout and biases. Scores are
// transposed, keys by queries.
#pragma once

#include "../../common/logits.cuh"
#include "../seen_bits.cuh"
#include "bias.cuh"

namespace dmattn::cuda::sm90 {

// Scores of gathered queries become -inf where the query does not list the key's block, and it is neither a local key of it nor a
// sink, or where the key's span hides it. Chunks that need no test have neither such spans nor local keys or sinks.
template <int kDim, int kN>
__device__ __forceinline__ void hide_unlisted(const AttentionParams& p, const KeyDescriptor& tile,
                                              const QueryDescriptor& descriptor, const ListedQueries<8 * kN>& listed,
                                              float (&scores)[kN][4]) {
  const ScorePlace<kDim> place;
  const uint32_t (&words)[kN / 4] = listed.listed[place.first_row / kListedKeys];  // the keys of a warp share them
  const auto hide = [&](const auto& hides) {
#pragma unroll
    for (int word = 0; word < kN / 4; ++word) {
      const uint32_t bits = words[word] >> place.column;
#pragma unroll
      for (int i = 4 * word; i < 4 * word + 4; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (hides(has_bit(bits, i % 4 * 8 + e % 2), i, e)) scores[i][e] = negative_infinity();
        }
      }
    }
  };
  if (!descriptor.needs_test) {
    hide([](bool is_listed, int, int) { return !is_listed; });
    return;
  }
  const int shift = static_cast<int>(p.key_length - p.query_length);
  const Seen span[2] = {tile.span[place.row], tile.span[place.row + 8]};
  const IndexLists& index = p.mask.index;
  const int last_local = local_shift(index, tile.batch, shift);  // from a query to the last of its local keys
  const int32_t* const queries = &listed.query[index_place<8 * kN>(place.column)];
  hide([&](bool is_listed, int i, int e) {
    const int query = queries[e % 2 * kN + i], key = tile.first_place + place.row + e / 2 * 8, behind = query + last_local - key;
    const bool is_forced = query >= 0 && (key < index.sinks || (behind >= 0 && behind < index.local));
    return !(is_listed || is_forced) || !span[e / 2].sees(query + shift);
  });
}

// What a union says of the thread's scores. Behind the last chunk of a tile visit it means nothing.
template <int kDim, int kN>
__device__ __forceinline__ SeenBits<kN> read_seen(const KeyDescriptor& tile, const QueryDescriptor& descriptor) {
  constexpr int kWords = kN / 4, kParts = kBackwardUnionWords / kWords;
  using Parts = uint32_t[kParts][kWords];
  const ScorePlace<kDim> place;
  const uint32_t part = static_cast<uint32_t>(descriptor.first_query - tile.from + place.column) / (8 * kN) % kParts;
  return {reinterpret_cast<const Parts&>(tile.union_seen[place.row])[part],
          reinterpret_cast<const Parts&>(tile.union_seen[place.row + 8])[part], place.column % 32};
}

// Scores that spans or the bits of a block mask hide become -inf.
template <int kDim, class Traits, int kN>
__device__ __forceinline__ void hide_scores(const AttentionParams& p, const KeyDescriptor& tile,
                                            const QueryDescriptor& descriptor, float (&scores)[kN][4]) {
  // Hide what the union of index lists hides.
  if constexpr (Traits::kIsUnion) {
    read_seen<kDim, kN>(tile, descriptor).hide(scores);
    return;
  }
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
  if (!Traits::kGathers && !Traits::kIsDense && descriptor.bits) {
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

// The query of a column of the chunk; gathered: the chunk's queries where they are gathered, or null.
template <int kQueries>
__device__ __forceinline__ int query_at(const QueryDescriptor& descriptor, const int32_t* gathered, int column) {
  return gathered ? max(gathered[index_place<kQueries>(column)], 0) : descriptor.first_query + column;
}

// Scores become probabilities exp(score - lse) in rows whose lse may be huge.
template <int kDim, int kN>
__device__ __forceinline__ void weigh_huge_scores(const BackwardCall& call, const KeyDescriptor& tile,
                                                  const QueryDescriptor& descriptor, const int32_t* gathered,
                                                  float (&scores)[kN][4]) {
  const AttentionParams& p = call.b.forward;
  const ScorePlace<kDim> place;
  const int64_t terms = (tile.batch * p.heads + descriptor.head) * call.padded_queries;
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
      const int64_t at = terms + query_at<8 * kN>(descriptor, gathered, place.column + 8 * i + e % 2);
      scores[i][e] = exp2_approx(
          probability_exponent(fmaf(scores[i][e], call.logit_scale, bias_of[e / 2]), call.lse[at], call.lse_rest2[at]));
    }
  }
}

// Scores become probabilities exp(score - lse). bias_2: key_bias of the thread's two keys in base 2.
template <class Traits, int kEarly, int kN>
__device__ __forceinline__ void weigh_scores(float (&scores)[kN][4], const QueryTerms<kEarly>& lse2_of, const float (&bias_2)[2],
                                             float scale_2) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    const float2 lse2 = lse2_of.pair(i);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float minus_lse2 = -(e % 2 == 0 ? lse2.x : lse2.y);
      scores[i][e] =
          exp2_approx(fmaf(scores[i][e], scale_2, Traits::kBias != Bias::kNone ? bias_2[e / 2] + minus_lse2 : minus_lse2));
    }
  }
}

// Scores become tanh(score * scale), by the function that forward has where there is a bias: a tanh that is off would make
// weights larger than 1. cap_slopes: the derivative of softcap for each, in float16 whatever T is, because it is at most 1. It is
// 0 where a score is not a number; such a score is hidden later.
template <int kSteps, int kN>
__device__ __forceinline__ void cap_scores(float (&scores)[kN][4], float scale, uint32_t (&cap_slopes)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    float slopes[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float tanh_of_score = tanh_by_exp(scores[i][e] * scale);
      slopes[e] = __saturatef(fmaf(-tanh_of_score, tanh_of_score, 1.0f));
      scores[i][e] = tanh_of_score;
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

// For instances with options. scores are products or, with softcap, tanh of them, -inf where they are hidden. They become
// `weights`, probabilities that dropout leaves, and `slopes`, probabilities times the derivative of softcap, negative where
// dropout drops them: both as operands of products. lse2_of, delta_of, row_hash: of the chunk's queries. What the dropped pairs
// add to a gradient of key_bias of its own is added to bias_sum.
template <class T, int kDim, bool kCaps, int kSteps, int kN>
__device__ __forceinline__ void weigh_with_options(const BackwardCall& call, const KeyDescriptor& tile,
                                                   const QueryDescriptor& descriptor, const int32_t* gathered,
                                                   const float (&scores)[kN][4], const float* lse2_of, const float* delta_of,
                                                   const uint32_t* row_hash, const float (&bias_2)[2], bool has_huge_rows,
                                                   uint32_t (&weights)[kSteps][4], uint32_t (&slopes)[kSteps][4],
                                                   float (&bias_sum)[2]) {
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
    const int64_t terms = (tile.batch * p.heads + descriptor.head) * call.padded_queries;
    weigh([&](float score, int i, int r, int e) {
      const int64_t at = terms + query_at<8 * kN>(descriptor, gathered, column + 8 * i + e);
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
// hide? lse2_of_queries: called without options, gives lse as QueryTerms.
template <class T, int kDim, class Traits, int kSteps, int kN, class GetTerms>
__device__ __forceinline__ void weigh_chunk(const BackwardCall& call, BackwardShared<kDim, Traits::kHasOptions>& shared,
                                            const KeyDescriptor& tile, const QueryDescriptor& descriptor, uint32_t stage,
                                            bool has_test, float (&scores)[kN][4], const float (&bias_2)[2], float (&bias_sum)[2],
                                            uint32_t (&weights)[kSteps][4], uint32_t (&slopes)[kSteps][4],
                                            uint32_t (&cap_slopes)[kSteps][4], const GetTerms& lse2_of_queries) {
  constexpr bool kHasPairBias = Traits::kBias == Bias::kPair;
  const bool has_huge_rows = shared.row_flags & kHugeRows;
  if constexpr (kHasPairBias) {
    if constexpr (Traits::kLogits == Logits::kCapped) cap_scores(scores, call.cap_scale, cap_slopes);
    BiasOfScores<T, kDim>{call, tile, descriptor}.add_to(scores);
  } else if (Traits::kHasOptions && call.cap_scale != 0.0f) {
    to_tanh(scores, call.cap_scale);
  }
  const int32_t* gathered = nullptr;
  if constexpr (Traits::kGathersQueries) {
    const auto& listed = shared.listed[&descriptor - shared.query_descriptors];
    gathered = listed.query;
    hide_unlisted<kDim>(call.b.forward, tile, descriptor, listed, scores);
  } else if (has_test) {
    hide_scores<kDim, Traits>(call.b.forward, tile, descriptor, scores);
  }
  if constexpr (Traits::kHasOptions) {
    weigh_with_options<T, kDim, !kHasPairBias>(call, tile, descriptor, gathered, scores, shared.lse2[stage], shared.delta[stage],
                                               shared.row_hash[stage], bias_2, has_huge_rows, weights, slopes, bias_sum);
  } else {
    if (Traits::kBias != Bias::kNone && has_huge_rows) {
      weigh_huge_scores<kDim>(call, tile, descriptor, gathered, scores);
    } else {
      weigh_scores<Traits>(scores, lse2_of_queries(), bias_2, call.scale_2);
    }
    narrow<T>(weights, scores);
  }
}

}  // namespace dmattn::cuda::sm90
