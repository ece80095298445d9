// Biases in the Hopper forward: adds key_bias and the bias of single pairs to the scores of a chunk.
#pragma once

#include "../../common/logits.cuh"
#include "../../ptx/wgmma.cuh"
#include "shared.cuh"

namespace dmattn::cuda::sm90 {

// May there be a bias of single pairs?
template <class Traits>
inline constexpr bool kMayHavePairBias = Traits::kBias == Bias::kPair || Traits::kBias == Bias::kCopied;
// Products that were not added to the key_bias become logits. With kMultipliesBias only columns of warps that saw a huge one were
// not.
template <class Traits, int kN, class Descriptor>
__device__ __forceinline__ void add_bias(float (&scores)[1][kN][4], const Descriptor& descriptor, int column, float scale) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    const bool is_natural = Descriptor::kBiasWarps == 1 || descriptor.has_huge[8 * i / 32 % Descriptor::kBiasWarps];
    float2 pair = {0.0f, 0.0f};
    if (is_natural || !kMultipliesBias<Traits>) {
      pair = *reinterpret_cast<const float2*>(&descriptor.key_bias[Descriptor::bias_place(column + 8 * i)]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& score = scores[0][i][e];
      // What is hidden stays so beside any key_bias: -inf and inf would add up to NaN.
      const float bias = score == negative_infinity() ? 0.0f : e % 2 == 0 ? pair.x : pair.y;
      score = is_natural ? fmaf(score, scale, bias) : (score + bias) * scale;
    }
    asm volatile("" ::: "memory");  // not all loads at once: registers are short here
  }
}

// The bias of pairs of a chunk: read while the scores are computed, so that its latency is hidden. Pairs of
// queries and keys that do not exist get that of some other pair; they are hidden afterwards.
template <class T, int kN>
struct ChunkBias {
  float of[kN][4];

  // `row` and `column` are those of the thread's first score.
  template <int kDim, class Traits>
  __device__ __forceinline__ void read(const ForwardCall& call, const ForwardWork& work,
                                       const ForwardShared<kDim, Traits>& shared, const TileDescriptor<kDim, Traits>& descriptor,
                                       uint32_t flags, uint32_t tile_number, int row, int column) {
    const AttentionParams& p = call.p;
    if (Traits::kBias != Bias::kPair || !p.bias.data) return;
    const QueryTileDescriptor& tile = shared.tiles[tile_number % ForwardShared<kDim, Traits>::kQueryTileDescriptors];
    const bool in_pairs = call.has_bias_pairs && (flags & (kInOrder | kLimit)) == kInOrder && descriptor.first_key % 2 == 0;
    if (p.bias_dtype == DType::kFloat32) {
      const float* const from[2] = {row_at<const float>(p, work, tile, row), row_at<const float>(p, work, tile, row + 8)};
      if (in_pairs) {
        read_pairs<float2>(from, descriptor.first_key + column, [](float2 pair) { return pair; });
      } else {
        read_each(p, descriptor, flags, column, 0, [&](int key) { return from[0][key]; });
        read_each(p, descriptor, flags, column, 1, [&](int key) { return from[1][key]; });
      }
    } else {
      const T* const from[2] = {row_at<const T>(p, work, tile, row), row_at<const T>(p, work, tile, row + 8)};
      if (in_pairs) {
        read_pairs<uint32_t>(from, descriptor.first_key + column, [](uint32_t pair) { return Element<T>::widen_pair(pair); });
      } else {
        read_each(p, descriptor, flags, column, 0, [&](int key) { return Element<T>::widen(from[0][key]); });
        read_each(p, descriptor, flags, column, 1, [&](int key) { return Element<T>::widen(from[1][key]); });
      }
    }
  }

 private:
  // The bias of the query in a row of the tile.
  template <class Stored>
  static __device__ __forceinline__ Stored* row_at(const AttentionParams& p, const ForwardWork& work,
                                                   const QueryTileDescriptor& tile, int row) {
    const int query = min(tile.first_query + work.query_of_row(row), static_cast<int>(p.query_length) - 1);
    return row_of<Stored>(p.bias, tile.batch, tile.head + work.head_of_row(row)) + query * p.bias_row_stride;
  }
  // Reads both rows before either is used, so that their latencies are one.
  template <class Pair, class Stored, class Widen>
  __device__ __forceinline__ void read_pairs(const Stored* const (&from)[2], int first, const Widen& widen) {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 pair = widen(*reinterpret_cast<const Pair*>(&from[r][first + 8 * i]));
        of[i][2 * r] = pair.x, of[i][2 * r + 1] = pair.y;
      }
    }
  }
  template <class Descriptor, class At>
  __device__ __forceinline__ void read_each(const AttentionParams& p, const Descriptor& descriptor, uint32_t flags, int column,
                                            int r, const At& at) {
    const int32_t* const indices = &descriptor.index[index_place<Descriptor::kKeys>(column)];
#pragma unroll
    for (int i = 0; i < kN; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key =
            flags & kInOrder ? descriptor.first_key + column + 8 * i + e : indices[index_place<Descriptor::kKeys>(8 * i + e)];
        of[i][2 * r + e] = at(min(max(key, 0), static_cast<int>(p.key_length) - 1));
      }
    }
  }
};

// The bias of a chunk that tensor copies have brought.
template <class T, int kN>
struct CopiedBias {
  uint32_t of[kN][2];  // pairs of columns, of the thread's two rows

  // `from` is the chunk's bias in shared memory, kRows rows of it; first_row is the warp's.
  template <int kRows>
  __device__ __forceinline__ void read(uint32_t from, int first_row) {
    // A lane gives the address of one of 16 rows, of the left or the right 8 columns.
    const uint32_t lane = read_lane();
    const uint32_t rows = from + (first_row + lane % 16) * 64, piece = ((lane / 16) ^ (lane % 8 / 2)) * 16;
#pragma unroll
    for (int i = 0; i < kN; i += 2) {
      uint32_t four[4];
      load_matrix(four, rows + i / 4 * (kRows * 64) + (piece ^ (i % 4 * 16)));
      of[i][0] = four[0], of[i][1] = four[1], of[i + 1][0] = four[2], of[i + 1][1] = four[3];
    }
  }

  // Products become logits.
  __device__ __forceinline__ void add_to(float (&scores)[kN][4], float scale) const {
#pragma unroll
    for (int i = 0; i < kN; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 pair = Element<T>::widen_pair(of[i][r]);
        scores[i][2 * r] = fmaf(scores[i][2 * r], scale, pair.x);
        scores[i][2 * r + 1] = fmaf(scores[i][2 * r + 1], scale, pair.y);
      }
    }
  }
};

// Reads the bias of chunk n, of tile number tile_number: `row` and `column` are those of the thread's first score, first_row is
// the warp's.
template <int kDim, class Traits, class PairBias>
__device__ __forceinline__ void read_pair_bias(PairBias& pair_bias, const ForwardCall& call, const ForwardWork& work,
                                               const ForwardShared<kDim, Traits>& shared, uint32_t n, uint32_t flags,
                                               uint32_t tile_number, int first_row, int row, int column) {
  constexpr ForwardShape kShape = kForwardShape<kDim, Traits>;
  if constexpr (Traits::kBias == Bias::kCopied) {
    const Ring<kShape.stages> bias_full{shared_address(shared.bias_full)}, bias_empty{shared_address(shared.bias_empty)};
    bias_full.wait_full(n);
    pair_bias.template read<kShape.rows()>(shared_address(shared.bias[n % kShape.stages]), first_row);
    barrier_arrive(bias_empty.at(n));
  } else {
    pair_bias.read(call, work, shared, shared.descriptors[n % kShape.descriptors], flags, tile_number, row, column);
  }
}

}  // namespace dmattn::cuda::sm90
