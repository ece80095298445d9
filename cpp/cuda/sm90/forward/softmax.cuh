// The scores of a chunk become weights in the Hopper forward: logits, mask, running maximum, exponentials, dropout.
#pragma once

#include "../../common/logits.cuh"
#include "../../common/softmax.cuh"
#include "../seen_bits.cuh"
#include "bias.cuh"
#include "mask.cuh"

namespace dmattn::cuda::sm90 {

// Weights that dropout drops become 0. key_hash: of the keys from the thread's first column on.
template <int kN>
__device__ __forceinline__ void drop_weights(float (&weights)[kN][4], const uint32_t* key_hash, const uint32_t (&row_hashes)[2],
                                             uint32_t threshold) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    const uint2 hashes = *reinterpret_cast<const uint2*>(&key_hash[8 * i]);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (!dropout_keeps_pair(row_hashes[e / 2], e % 2 == 0 ? hashes.x : hashes.y, threshold)) weights[i][e] = 0.0f;
    }
  }
}

// Turns products into weights: logits, what is hidden, the running maximum; then `between`; then exponentials and dropout. True
// when the maximum of some row of the warp moves, and sums have to be rescaled by `factor`. `row` and `column` are those of the
// thread's first score, `has_bias` says that products are added to key_bias. pair_bias: ChunkBias, or CopiedBias.
template <class T, int kDim, class Traits, class Softmax, int kN, class PairBias, class Between>
__device__ __forceinline__ bool weigh_scores(const ForwardCall& call, const ForwardWork& work,
                                             const ForwardShared<kDim, Traits>& shared,
                                             const TileDescriptor<kDim, Traits>& descriptor, uint32_t flags, uint32_t tile_number,
                                             float (&scores)[1][kN][4], Softmax& softmax, float (&factor)[2], int row, int column,
                                             bool has_bias, const PairBias& pair_bias, const Between& between) {
  using Descriptor = TileDescriptor<kDim, Traits>;
  constexpr bool kNatural = Traits::kBias != Bias::kNone;
  const AttentionParams& p = call.p;
  const QueryTileDescriptor& tile = shared.tiles[tile_number % ForwardShared<kDim, Traits>::kQueryTileDescriptors];
  // Scores times `unit` are in the units of the running maximum, scores times to_base_2 are logits in base 2.
  float unit = kNatural ? call.scale : call.scale_2, to_base_2 = call.scale_2;
  const int32_t* const indices = &descriptor.index[index_place<Descriptor::kKeys>(column)];
  auto key_of = [&](int i, int e) {
    return flags & kInOrder ? descriptor.first_key + column + 8 * i + e : indices[index_place<Descriptor::kKeys>(8 * i + e)];
  };
  if constexpr (Traits::kLogits == Logits::kAny) {
    unit = 1.0f, to_base_2 = kLog2e;
    const float* const key_bias = &descriptor.key_bias[Descriptor::bias_place(column)];  // places add up, as columns do
    const LogitCap cap(p.softcap);
    float to_logit = call.scale;  // the factor that is still to be applied
    if (p.softcap > 0) {
#pragma unroll
      for (int i = 0; i < kN; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[0][i][e] = cap(scores[0][i][e] * to_logit);
      }
      to_logit = 1.0f;
    }
#pragma unroll
    for (int i = 0; i < kN; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        scores[0][i][e] = fmaf(scores[0][i][e], to_logit, key_bias[Descriptor::bias_place(8 * i + e % 2)]);
    }
    if (p.bias.data) {
#pragma unroll
      for (int i = 0; i < kN; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[0][i][e] += pair_bias.of[i][e];
      }
    }
  }
  if constexpr (Traits::kBias == Bias::kCopied) {
    unit = 1.0f, to_base_2 = kLog2e;
    pair_bias.add_to(scores[0], call.scale);
  }
  // Cap the products. A key_bias is added afterwards.
  bool is_biased = has_bias;
  if constexpr (Traits::kLogits == Logits::kCapped) {
    if (call.cap_scale != 0.0f) {
      to_tanh(scores[0], call.cap_scale);
      if constexpr (Traits::kGathers) {
        is_biased = p.key_bias.data;
        if (is_biased && !(flags & kHuge)) {
#pragma unroll
          for (int i = 0; i < kN; ++i) {
            const float2 pair = *reinterpret_cast<const float2*>(&descriptor.key_bias[Descriptor::bias_place(column + 8 * i)]);
            scores[0][i][0] += pair.x, scores[0][i][1] += pair.y, scores[0][i][2] += pair.x, scores[0][i][3] += pair.y;
          }
        }
      }
    }
  }
  // Hide what the descriptor says some rows do not see. A warp all of whose rows see the tested keys has nothing to hide.
  if (Traits::kGathers && !(flags & (kTested << (row / 16)))) flags &= ~(kSpans | kFew);
  if (Traits::kKeys == Keys::kIntervals && !(flags & (kTested << (thread_index() / 32)))) flags &= ~kSpans;
  if (is_biased) flags &= ~kGaps;
  if constexpr (Traits::kIsUnion) {
    if (flags & kSpans) {
      SeenBits<kN>(descriptor.bits[work.query_of_row(row)], descriptor.bits[work.query_of_row(row + 8)], column).hide(scores[0]);
    }
  } else if (flags & (kLimit | kSpans | kBits | kFew | kGaps)) {
    const int low = tile.first_query + static_cast<int>(p.key_length - p.query_length);
    const int queries[2] = {work.query_of_row(row), work.query_of_row(row + 8)};
    const int last_key = Traits::kBias == Bias::kCopied ? static_cast<int>(p.key_length) - 1 : kLastPosition;
    hide(scores[0], descriptor, flags, p.mask.is_causal, last_key, column, {low + queries[0], low + queries[1]}, queries);
  }
  const bool has_huge = Traits::kBias == Bias::kKey && __any_sync(0xffffffffu, flags & kHuge);
  if (has_huge) {
    add_bias<Traits>(scores, descriptor, column, call.scale);
    unit = 1.0f;
  }
  // Move the running maximum where scores have outgrown it.
  const bool moves = softmax.move_maximum(scores[0], unit, factor);
  between();
  bool is_subtracted = has_huge;
  if constexpr (kMayHavePairBias<Traits>) {
    const auto is_huge = [](float maximum) { return fabsf(Softmax::reference_of(maximum)) > kHugeBias; };
    is_subtracted = __any_sync(0xffffffffu, is_huge(softmax.maximum[0][0]) || is_huge(softmax.maximum[0][1]));
  }
  if (is_subtracted) {
    if constexpr (kNatural) softmax.subtract_maximum(scores[0]);
    to_base_2 = 1.0f;
  }
  // Turn scores into weights and add them to the rows' sums.
  softmax.exponentiate(scores[0], to_base_2, is_subtracted);
  if constexpr (Traits::kHasOptions) {
    if (call.threshold != 0) {
      drop_weights(scores[0], &descriptor.key_hash[column], {shared.row_hash[row], shared.row_hash[row + 8]}, call.threshold);
    }
  }
  if constexpr (Traits::kLogits == Logits::kAny) {
    if (call.threshold != 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t row_hash = shared.row_hash[row + 8 * r];
#pragma unroll
        for (int i = 0; i < kN; ++i) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const uint32_t key_hash = dropout_key_hash(static_cast<uint32_t>(key_of(i, e)));
            if (!dropout_keeps_pair(row_hash, key_hash, call.threshold)) scores[0][i][2 * r + e] = 0.0f;
          }
        }
      }
    }
  }
  return moves;
}

// Computes dropout's hashes of a tile's rows, each warp of its own. `row` is the thread's first row.
template <int kDim, class Traits>
__device__ __forceinline__ void hash_rows(const ForwardCall& call, const ForwardWork& work, ForwardShared<kDim, Traits>& shared,
                                          uint32_t tile_number, int row) {
  if constexpr (Traits::kMayDrop) {
    if (call.threshold == 0) return;
    const QueryTileDescriptor& tile = shared.tiles[tile_number % ForwardShared<kDim, Traits>::kQueryTileDescriptors];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Dropout dropout(call.p, tile.batch, tile.head + work.head_of_row(row + 8 * r));
      shared.row_hash[row + 8 * r] = dropout_row_hash(dropout.row_key(tile.first_query + work.query_of_row(row + 8 * r)));
    }
    __syncwarp();
  }
}

}  // namespace dmattn::cuda::sm90
