// Attention forward for Hopper. A block stays on its multiprocessor and takes tile after tile. Its scheduler warps find the keys
// of a tile and write descriptors, its loading warps load what the descriptors say, and two or three warpgroups compute. The
// tensor cores multiply for one chunk while the threads do the softmax of another.
//
// To the computing warpgroups a chunk is some rows of keys in shared memory and a descriptor, whether the rows were loaded by a
// tensor copy or gathered one by one, and whether or not they belong to the next tile.
#pragma once

#include <type_traits>

#include "../common/dependent_launch.cuh"
#include "../common/kernel_limits.cuh"
#include "../common/logits.cuh"
#include "../common/softmax.cuh"
#include "forward_load.cuh"

namespace dmattn::cuda::sm90 {

// Scores that the descriptor hides become -inf. positions and queries are those of the thread's two rows. last_key: of the call,
// for variants whose chunks may reach beyond it.
template <int kN, class Descriptor>
__device__ __forceinline__ void hide(float (&scores)[kN][4], const Descriptor& descriptor, uint32_t flags, bool is_causal,
                                     int last_key, int column, const int (&positions)[2], const int (&queries)[2]) {
  auto keep = [&](int i, int r, bool left, bool right) {
    if (!left) scores[i][2 * r] = negative_infinity();
    if (!right) scores[i][2 * r + 1] = negative_infinity();
  };
  if ((Descriptor::kIsDense && !Descriptor::kHasKeyBias) || flags & kLimit) {
    const int base = descriptor.first_key + column;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int last = is_causal ? positions[r] : last_key;
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const int key = base + 8 * i;
        keep(i, r, key >= 0 && key <= last, key + 1 >= 0 && key + 1 <= last);
      }
    }
  } else if (flags & (kSpans | kFew)) {
    if constexpr (Descriptor::kIsGathered) {
      const int warp = static_cast<int>(threadIdx.x) / 32, lane = read_lane();
      const uint4* const seen = reinterpret_cast<const uint4*>(&descriptor.seen[warp][Descriptor::seen_place(lane % 4 * 2)]);
      const uint32_t row = 1u << (lane / 4);  // the row 8 further on is 8 bits further on, the next column 16
#pragma unroll
      for (int i = 0; i < kN; i += 4) {
        if (i == kFewRows / 8 && !(flags & kSpans)) break;
        const uint4 four = seen[i / 4];
        const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int r = 0; r < 2; ++r) keep(i + j, r, words[j] & (row << (8 * r)), words[j] & (row << (16 + 8 * r)));
        }
        asm volatile("" ::: "memory");  // not all loads at once: registers are short here
      }
    } else if (Descriptor::kHasKeyBias && !(flags & kStarts)) {
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const int2 last = *reinterpret_cast<const int2*>(&descriptor.last[column + 8 * i]);
#pragma unroll
        for (int r = 0; r < 2; ++r) keep(i, r, positions[r] < last.x, positions[r] < last.y);
        if (i % 4 == 3) asm volatile("" ::: "memory");
      }
    } else {
#pragma unroll
      for (int i = 0; i < kN; ++i) {
        const int4 spans = *reinterpret_cast<const int4*>(&descriptor.span[column + 8 * i]);
        const Seen left{spans.x, static_cast<uint32_t>(spans.y)}, right{spans.z, static_cast<uint32_t>(spans.w)};
#pragma unroll
        for (int r = 0; r < 2; ++r) keep(i, r, left.sees(positions[r]), right.sees(positions[r]));
        if (i % 4 == 3) asm volatile("" ::: "memory");
      }
    }
  } else if constexpr (Descriptor::kHasBits) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int w = 0; w < kN / 4; ++w) {
        const uint32_t bits = descriptor.bits[queries[r]][w] >> column;
#pragma unroll
        for (int i = 0; i < 4; ++i) keep(4 * w + i, r, has_bit(bits, 8 * i), has_bit(bits, 8 * i + 1));
        asm volatile("" ::: "memory");
      }
    }
  }
  if constexpr (Descriptor::kIsGathered) {
    if (flags & kGaps) {
      const int rows_present = descriptor.rows_present - column;
#pragma unroll
      for (int i = 0; i < kN; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) keep(i, r, 8 * i < rows_present, 8 * i + 1 < rows_present);
      }
    }
  }
}

// May there be a bias of single pairs?
template <Variant kVariant>
inline constexpr bool kMayHavePairBias = copies_bias(kVariant) || kVariant == Variant::kGeneral;
// May logits have a bias? Then the running maximum is a logit itself (common/softmax.cuh).
template <Variant kVariant>
inline constexpr bool kMayHaveBias = starts_with_bias(kVariant) || kMayHavePairBias<kVariant>;

// Products that were not added to the key_bias become logits. With multiplies_bias only columns of warps that saw a huge one were
// not.
template <Variant kVariant, int kN, class Descriptor>
__device__ __forceinline__ void add_bias(float (&scores)[1][kN][4], const Descriptor& descriptor, int column, float scale) {
#pragma unroll
  for (int i = 0; i < kN; ++i) {
    const bool is_natural = Descriptor::kBiasWarps == 1 || descriptor.has_huge[8 * i / 32 % Descriptor::kBiasWarps];
    float2 pair = {0.0f, 0.0f};
    if (is_natural || !multiplies_bias(kVariant)) {
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

// The bias of a chunk, of the general variant: read while the scores are computed, so that its latency is hidden. Pairs of
// queries and keys that do not exist get that of some other pair; they are hidden afterwards.
template <class T, int kN>
struct ChunkBias {
  float of[kN][4];

  // `row` and `column` are those of the thread's first score.
  template <int kDim, Variant kVariant>
  __device__ __forceinline__ void read(const ForwardCall& call, const ForwardWork& work,
                                       const ForwardShared<kDim, kVariant>& shared,
                                       const TileDescriptor<kDim, kVariant>& descriptor, uint32_t flags, uint32_t tile_number,
                                       int row, int column) {
    const AttentionParams& p = call.p;
    if (kVariant != Variant::kGeneral || !p.bias.data) return;
    const QueryTileDescriptor& tile = shared.tiles[tile_number % ForwardShared<kDim, kVariant>::kQueryTileDescriptors];
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

// The bias of a chunk that tensor copies have brought, of the variants that have no other.
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
template <int kDim, Variant kVariant, class PairBias>
__device__ __forceinline__ void read_pair_bias(PairBias& pair_bias, const ForwardCall& call, const ForwardWork& work,
                                               const ForwardShared<kDim, kVariant>& shared, uint32_t n, uint32_t flags,
                                               uint32_t tile_number, int first_row, int row, int column) {
  constexpr ForwardShape kShape = kForwardShape<kDim, kVariant>;
  if constexpr (copies_bias(kVariant)) {
    const Ring<kShape.stages> bias_full{shared_address(shared.bias_full)}, bias_empty{shared_address(shared.bias_empty)};
    bias_full.wait_full(n);
    pair_bias.template read<kShape.rows()>(shared_address(shared.bias[n % kShape.stages]), first_row);
    barrier_arrive(bias_empty.at(n));
  } else {
    pair_bias.read(call, work, shared, shared.descriptors[n % kShape.descriptors], flags, tile_number, row, column);
  }
}

// Turns products into weights: logits, what is hidden, the running maximum; then `between`; then exponentials and dropout. True
// when the maximum of some row of the warp moves, and sums have to be rescaled by `factor`. `row` and `column` are those of the
// thread's first score, `has_bias` says that products are added to key_bias. pair_bias: ChunkBias, or CopiedBias.
template <class T, int kDim, Variant kVariant, class Softmax, int kN, class PairBias, class Between>
__device__ __forceinline__ bool weigh_scores(const ForwardCall& call, const ForwardWork& work,
                                             const ForwardShared<kDim, kVariant>& shared,
                                             const TileDescriptor<kDim, kVariant>& descriptor, uint32_t flags,
                                             uint32_t tile_number, float (&scores)[1][kN][4], Softmax& softmax,
                                             float (&factor)[2], int row, int column, bool has_bias, const PairBias& pair_bias,
                                             const Between& between) {
  using Descriptor = TileDescriptor<kDim, kVariant>;
  constexpr bool kNatural = kMayHaveBias<kVariant>;
  const AttentionParams& p = call.p;
  const QueryTileDescriptor& tile = shared.tiles[tile_number % ForwardShared<kDim, kVariant>::kQueryTileDescriptors];
  // Scores times `unit` are in the units of the running maximum, scores times to_base_2 are logits in base 2.
  float unit = kNatural ? call.scale : call.scale_2, to_base_2 = call.scale_2;
  const int32_t* const indices = &descriptor.index[index_place<Descriptor::kKeys>(column)];
  auto key_of = [&](int i, int e) {
    return flags & kInOrder ? descriptor.first_key + column + 8 * i + e : indices[index_place<Descriptor::kKeys>(8 * i + e)];
  };
  if constexpr (kVariant == Variant::kGeneral) {
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
  if constexpr (copies_bias(kVariant)) {
    unit = 1.0f, to_base_2 = kLog2e;
    pair_bias.add_to(scores[0], call.scale);
  }
  // Cap the products. A key_bias is added afterwards.
  bool is_biased = has_bias;
  if constexpr (may_cap(kVariant)) {
    if (call.cap_scale != 0.0f) {
      to_tangents(scores[0], call.cap_scale);
      if constexpr (gathers_keys(kVariant)) {
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
  if (gathers_keys(kVariant) && !(flags & (kTested << (threadIdx.x / 32)))) flags &= ~(kSpans | kFew);
  if (kVariant == Variant::kKeyBias && !(flags & (kTested << (thread_index() / 32)))) flags &= ~kSpans;
  if (is_biased) flags &= ~kGaps;
  if (flags & (kLimit | kSpans | kBits | kFew | kGaps)) {
    const int low = tile.first_query + static_cast<int>(p.key_length - p.query_length);
    const int queries[2] = {work.query_of_row(row), work.query_of_row(row + 8)};
    const int last_key = copies_bias(kVariant) ? static_cast<int>(p.key_length) - 1 : kLastPosition;
    hide(scores[0], descriptor, flags, p.mask.is_causal, last_key, column, {low + queries[0], low + queries[1]}, queries);
  }
  const bool has_huge = starts_with_bias(kVariant) && __any_sync(0xffffffffu, flags & kHuge);
  if (has_huge) {
    add_bias<kVariant>(scores, descriptor, column, call.scale);
    unit = 1.0f;
  }
  // Move the running maximum where scores have outgrown it.
  const bool moves = softmax.move_maximum(scores[0], unit, factor);
  between();
  bool is_subtracted = has_huge;
  if constexpr (kMayHavePairBias<kVariant>) {
    const auto is_huge = [](float maximum) { return fabsf(Softmax::reference_of(maximum)) > kHugeBias; };
    is_subtracted = __any_sync(0xffffffffu, is_huge(softmax.maximum[0][0]) || is_huge(softmax.maximum[0][1]));
  }
  if (is_subtracted) {
    if constexpr (kNatural) softmax.subtract_maximum(scores[0]);
    to_base_2 = 1.0f;
  }
  // Turn scores into weights and add them to the rows' sums.
  softmax.exponentiate(scores[0], to_base_2, is_subtracted);
  if constexpr (has_options(kVariant)) {
    if (call.threshold != 0) {
      drop_weights(scores[0], &descriptor.key_hash[column], {shared.row_hash[row], shared.row_hash[row + 8]}, call.threshold);
    }
  }
  if constexpr (kVariant == Variant::kGeneral) {
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
template <int kDim, Variant kVariant>
__device__ __forceinline__ void hash_rows(const ForwardCall& call, const ForwardWork& work, ForwardShared<kDim, kVariant>& shared,
                                          uint32_t tile_number, int row) {
  if constexpr (kMayDrop<kVariant>) {
    if (call.threshold == 0) return;
    const QueryTileDescriptor& tile = shared.tiles[tile_number % ForwardShared<kDim, kVariant>::kQueryTileDescriptors];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Dropout dropout(call.p, tile.batch, tile.head + work.head_of_row(row + 8 * r));
      shared.row_hash[row + 8 * r] = dropout_row_hash(dropout.row_key(tile.first_query + work.query_of_row(row + 8 * r)));
    }
    __syncwarp();
  }
}

// Normalises and writes a tile. Where a block has room for two tiles of queries, a warp's rows of the output take the place of
// its rows of the queries in shared memory, and a tensor copy writes them out. `row` is the thread's first row.
template <class T, int kDim, Variant kVariant, class Softmax>
__device__ __forceinline__ void store_tile(const ForwardCall& call, const ForwardWork& work, const ForwardMaps& maps,
                                           ForwardShared<kDim, kVariant>& shared, float (&out)[1][kDim / 8][4],
                                           const Softmax& sums, uint32_t tile_number, int group, int warp, int lane, int row) {
  using Shared = ForwardShared<kDim, kVariant>;
  constexpr ForwardShape kShape = Shared::kShape;
  constexpr int kRows = Shared::kRows, kOut = kDim / 8, kQueryTileDescriptors = Shared::kQueryTileDescriptors;
  constexpr bool kByCopy = Shared::kByCopy, kNatural = kMayHaveBias<kVariant>;
  const AttentionParams& p = call.p;
  const QueryTileDescriptor tile = shared.tiles[tile_number % kQueryTileDescriptors];
  // Find the factor and the log-sum-exp of the thread's two rows.
  float scales[2];
  LogSum log_sums[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sums.finish(0, r, log_sums[r], scales[r]);
    if constexpr (kMayDrop<kVariant>) scales[r] *= call.keep_scale;
  }
  // Clear rows that see nothing: NaN of keys that other rows see must not reach them.
  if (__any_sync(0xffffffffu, scales[0] == 0.0f || scales[1] == 0.0f)) {
#pragma unroll
    for (int i = 0; i < kOut; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[0][i][e] = scales[e / 2] == 0.0f ? 0.0f : out[0][i][e];
    }
  }
  // Write the rows straight to global memory, or by way of shared memory and a tensor copy.
  if constexpr (!kByCopy) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int head = tile.head + work.head_of_row(row + 8 * r);
      const int query = tile.first_query + work.query_of_row(row + 8 * r);
      T* const to =
          static_cast<T*>(p.out.data) + tile.batch * p.out.batch_stride + head * p.out.head_stride + query * p.out.row_stride;
#pragma unroll
      for (int i = 0; i < kOut; i += 4) {
        uint32_t piece[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          piece[j] = Element<T>::narrow_pair(out[0][i + j][2 * r] * scales[r], out[0][i + j][2 * r + 1] * scales[r]);
        }
        transpose_quad(piece);
        const int at = (i + lane % 4) * 8;
        if (query < p.query_length && at < p.value_dim) {
          *reinterpret_cast<uint4*>(to + at) = {piece[0], piece[1], piece[2], piece[3]};
        }
      }
    }
  }
  if constexpr (kByCopy) {
    const int first_row = row & ~15;  // of the warp
    const uint32_t rows = shared_address(shared.query[tile_number % kShape.query_tiles]) + first_row * 128;
    const int own = read_lane();
    const uint32_t to = rows + own % 16 * 128, swizzle = ((own / 16) ^ (own % 8)) * 16;
#pragma unroll
    for (int i = 0; i < kOut; i += 2) {
      store_matrix(to + i / 8 * (kRows * 128) + (swizzle ^ (i % 8 * 16)),
                   Element<T>::narrow_pair(out[0][i][0] * scales[0], out[0][i][1] * scales[0]),
                   Element<T>::narrow_pair(out[0][i][2] * scales[1], out[0][i][3] * scales[1]),
                   Element<T>::narrow_pair(out[0][i + 1][0] * scales[0], out[0][i + 1][1] * scales[0]),
                   Element<T>::narrow_pair(out[0][i + 1][2] * scales[1], out[0][i + 1][3] * scales[1]));
    }
    fence_async();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int panel = 0; panel < kDim / 64; ++panel) {
        store_box(&maps.out, rows + panel * (kRows * 128), panel * 64, work.head_of_row(first_row),
                  tile.first_query + work.query_of_row(first_row), tile.head >> work.log2_heads_per_tile, tile.batch);
      }
      commit_stores();
    }
  }
  // Write lse, after the fence, which waits for stores.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = tile.head + work.head_of_row(row + 8 * r);
    const int query = tile.first_query + work.query_of_row(row + 8 * r);
    if (query < p.query_length && lane % 4 == 0) {
      const int64_t at = (tile.batch * p.heads + head) * p.query_length + query;
      static_cast<float*>(p.lse)[at] = log_sums[r].value;
      if (kNatural && p.lse_rest) static_cast<float*>(p.lse_rest)[at] = log_sums[r].rest;
    }
  }
}

// Issues scores = Q K^T. All operands are described tiles. is_biased: scores hold the key_bias, and products are added to it;
// with multiplies_bias a product brings it first, whatever they hold, and a huge one has zeros for its thirds.
template <class T, int kDim, Variant kVariant, int kN>
__device__ __forceinline__ void issue_scores(float (&scores)[kN][4], uint32_t queries, uint32_t keys, uint32_t ones,
                                             uint32_t thirds, bool is_biased) {
  constexpr ForwardShape kShape = kForwardShape<kDim, kVariant>;
  if constexpr (multiplies_bias(kVariant)) {
    Product<__nv_bfloat16, kShape.keys>::from_shared(scores, complete_narrow(ones), complete_narrow(thirds), 0);
  }
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    Product<T, kShape.keys>::from_shared(scores, complete(queries + step_of_columns(k, kShape.rows() * 128)),
                                         complete(keys + step_of_columns(k, kShape.keys * 128)),
                                         multiplies_bias(kVariant) || is_biased || k > 0);
  }
  commit_products();
}

template <int kOut>
__device__ __forceinline__ void clear_sums(float (&out)[kOut][4]) {
#pragma unroll
  for (int i = 0; i < kOut; ++i) out[i][0] = out[i][1] = out[i][2] = out[i][3] = 0.0f;
}

// query [B, H, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv] -> out [B, H, Sq, Dv], lse [B, H, Sq].
// What a computing warpgroup does: 64 rows of a tile, rows being (query, head) pairs, against chunks of keys [keys, D] and values
// [keys, Dv] in shared memory, as the descriptors say. Scores [64, keys] and sums [64, Dv] stay in registers.
template <class T, int kDim, Variant kVariant>
__device__ __forceinline__ void compute_tiles(const ForwardCall& call, const ForwardWork& work, const ForwardMaps& maps,
                                              ForwardShared<kDim, kVariant>& shared) {
  constexpr ForwardShape kShape = kForwardShape<kDim, kVariant>;
  using Descriptor = TileDescriptor<kDim, kVariant>;
  constexpr int kRows = kShape.rows(), kN = kShape.keys / 8, kOut = kDim / 8, kSteps = kShape.keys / 16;
  const AttentionParams& p = call.p;
  // Taken from lane 0, so that the assembler knows it is the same in all lanes and keeps what follows from it in uniform
  // registers.
  const int group = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int warp = thread / 32, lane = thread % 32, column = lane % 4 * 2;
  const int row = group * 64 + warp * 16 + lane / 4;  // of the tile; the thread's other row is row + 8

  const Ring<kShape.descriptors> descriptor_empty{shared_address(shared.descriptor_empty)};
  const Ring<kShape.stages> key_full{shared_address(shared.key_full)}, key_empty{shared_address(shared.key_empty)},
      value_full{shared_address(shared.value_full)}, value_empty{shared_address(shared.value_empty)};
  const Ring<kShape.query_tiles> query_full{shared_address(shared.query_full)}, query_empty{shared_address(shared.query_empty)};
  const uint32_t query_tiles = describe_panels(shared_address(shared.query) + group * (64 * 128), kRows * 128);
  const uint32_t key_tiles = describe_panels(shared_address(shared.key), kShape.keys * 128);
  const uint32_t value_tiles = describe_panels(shared_address(shared.value), kShape.keys * 128);
  constexpr uint32_t kStageStep = step_of(kShape.keys * kDim * 2), kTileStep = step_of(kRows * kDim * 2);

  float out[1][kOut][4], scores[1][kN][4];
  uint32_t weights[kSteps][4];

  // In the gathered variants key_bias is what products are added to, unless they are capped. Threads read it into the scores, or
  // a product of its own brings it there.
  const bool has_bias = kVariant == Variant::kKeyBias ||
                        (starts_with_bias(kVariant) && p.key_bias.data && (!has_options(kVariant) || call.cap_scale == 0.0f));
  const bool reads_bias = has_bias && !multiplies_bias(kVariant);
  const uint32_t ones = describe_narrow(shared_address(shared.bias_operands.ones)),
                 thirds = describe_narrow(shared_address(shared.bias_operands.thirds));
  auto read_bias = [&](const Descriptor& descriptor, int i) {
    const float2 pair = *reinterpret_cast<const float2*>(&descriptor.key_bias[Descriptor::bias_place(column + 8 * i)]);
    scores[0][i][0] = scores[0][i][2] = pair.x, scores[0][i][1] = scores[0][i][3] = pair.y;
  };
  auto begin_scores = [&](uint32_t tile, uint32_t stage, uint32_t flags) {
    const bool is_biased = has_bias && !(flags & kHuge);
    const uint32_t a = __shfl_sync(0xffffffffu, query_tiles + tile % kShape.query_tiles * kTileStep, 0);  // the same in all lanes
    const uint32_t b = key_tiles + stage * kStageStep;
    issue_scores<T, kDim, kVariant>(scores[0], a, b, ones, thirds + stage * step_of(kShape.keys * kNarrowRowBytes), is_biased);
  };
  auto begin_sums = [&](uint32_t stage) {
    constexpr int kPart = kDim < 128 ? kDim : 128;  // columns at a time
    const uint32_t b = value_tiles + stage * kStageStep;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int part = 0; part < kDim; part += kPart) {
        Product<T, kPart>::from_registers(reinterpret_cast<float (&)[kPart / 8][4]>(out[0][part / 8]), weights[k],
                                          complete(b + step_of(part / 64 * (kShape.keys * 128) + k * (16 * 128))));
      }
    }
    commit_products();
  };
  // Narrows the weights of one chunk to operands; where threads read key_bias, that of the next chunk takes their place in
  // scores.
  auto narrow_weights = [&](const Descriptor& next) {
    auto narrow = [&](const auto& then) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto& pair = scores[0][2 * k + i / 2];
          weights[k][i] = Element<T>::narrow_pair(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
        }
        then(2 * k), then(2 * k + 1);
      }
    };
    if (reads_bias) {
      narrow([&](int i) { read_bias(next, i); });
      pin(scores[0]);
    } else {
      narrow([](int) {});
    }
  };

  using Softmax = OnlineSoftmaxInParts<kMayHaveBias<kVariant>>;
  Softmax softmax;
  std::conditional_t<copies_bias(kVariant), CopiedBias<T, kN>, ChunkBias<T, kN>> pair_bias;
  float factor[2];
  bool moves = false;
  auto weigh = [&](const Descriptor& descriptor, uint32_t flags, uint32_t tile_number, const auto& between) {
    moves = weigh_scores<T, kDim, kVariant>(call, work, shared, descriptor, flags, tile_number, scores, softmax, factor, row,
                                            column, has_bias, pair_bias, between);
  };

  constexpr bool kByCopy = ForwardShared<kDim, kVariant>::kByCopy;
  auto store = [&](const Softmax& sums, uint32_t tile_number) {
    store_tile<T>(call, work, maps, shared, out, sums, tile_number, group, warp, lane, row);
  };
  // Says that the place of a tile's queries is free: when its last scores are done, or when its output has left from that place.
  bool is_storing = false;
  auto free_queries = [&](uint32_t tile_number) {
    if (kByCopy && lane == 0) wait_stores_read();
    barrier_arrive(query_empty.at(tile_number));
    is_storing = false;
  };

  // Compute the very first scores, beside which nothing else can run.
  uint32_t n = 0, tile = 0;
  key_full.wait_full(0);
  uint32_t flags = shared.descriptors[0].flags;
  if (flags & kEnd) return;
  query_full.wait_full(0);
  clear_sums(out[0]);
  if (reads_bias) {
#pragma unroll
    for (int i = 0; i < kN; ++i) read_bias(shared.descriptors[0], i);
  }
  pin(scores[0]);
  begin_products();
  begin_scores(0, 0, flags);
  read_pair_bias(pair_bias, call, work, shared, 0, flags, 0, group * 64 + warp * 16, row, column);
  wait_products<0>();
  pin(scores[0]);
  barrier_arrive(key_empty.at(0));
  if (!kByCopy && flags & kLast) free_queries(0);
  hash_rows(call, work, shared, 0, row);
  weigh(shared.descriptors[0], flags, 0, [] {});
  barrier_arrive(descriptor_empty.at(0));

  // Goes on to the next chunk's descriptor. Called before waiting for the products of the chunk before, so that the flags are
  // known in time.
  bool is_first = false;  // chunk n belongs to the next tile
  auto look_ahead = [&] {
    is_first = flags & kLast;
    ++n;
    key_full.wait_full(n);
    flags = shared.descriptors[n % kShape.descriptors].flags;
  };

  // From here on the scores of one chunk are computed beside the sums of the one before, which may belong to the tile before.
  look_ahead();
  // At the end the descriptor has no key_bias, and what is read is not used.
  narrow_weights(shared.descriptors[n % kShape.descriptors]);
  while (!(flags & kEnd)) {
    // Wait for the queries of the next tile, if chunk n is its first.
    if (is_first) {
      if (is_storing) free_queries(tile - 1);
      query_full.wait_full(tile + 1);
    }
    pin(scores[0]);
    pin(out[0]);
    begin_products();
    // Issue scores = Q K^T of chunk n.
    begin_scores(tile + is_first, n % kShape.stages, flags);
    // Wait for the values of chunk n - 1, and issue out += weights V.
    value_full.wait_full(n - 1);
    begin_sums((n - 1) % kShape.stages);
    if (is_storing) free_queries(tile - 1);
    read_pair_bias(pair_bias, call, work, shared, n, flags, tile + is_first, group * 64 + warp * 16, row, column);
    // Wait for the scores; the keys' place is free.
    wait_products<1>();
    pin(scores[0]);
    barrier_arrive(key_empty.at(n));
    if (!kByCopy && flags & kLast) free_queries(tile + is_first);
    // Turn the scores of chunk n into weights, beside the product with the values of chunk n - 1.
    const Softmax ended = softmax;
    if (is_first) softmax = Softmax(), hash_rows(call, work, shared, tile + 1, row);
    weigh(shared.descriptors[n % kShape.descriptors], flags, tile + is_first, [&] {
      if constexpr (gathers_keys(kVariant)) {  // such values are long in coming, so their place is freed early
        wait_products<0>();
        pin(out[0]);
        barrier_arrive(value_empty.at(n - 1));
      }
    });
    // The address waits for the sums, which are never negative: otherwise the assembler puts the exponentials behind the next
    // wait, where no product hides them.
    barrier_arrive(descriptor_empty.at(n) + (softmax.sum[0][0] + softmax.sum[0][1] < -1.0f));
    // Wait for the descriptor of chunk n + 1, then for the sums of chunk n - 1.
    const bool ends_tile = is_first;
    look_ahead();
    wait_products<0>();
    pin(out[0]);
    if constexpr (!gathers_keys(kVariant)) barrier_arrive(value_empty.at(n - 2));
    // Store the tile that has ended, or rescale its sums if a maximum moved.
    if (ends_tile) {
      store(ended, tile++);
      is_storing = kByCopy;
      clear_sums(out[0]);
    } else if (moves) {
      Softmax::rescale(out[0], factor);
    }
    // Narrow the weights to the operand of the next product.
    narrow_weights(shared.descriptors[n % kShape.descriptors]);
  }
  // Add the last chunk, and store the last tile.
  value_full.wait_full(n - 1);
  pin(out[0]);
  begin_products();
  begin_sums((n - 1) % kShape.stages);
  wait_products<0>();
  pin(out[0]);
  if (is_storing) free_queries(tile - 1);
  store(softmax, tile);
  if (kByCopy && lane == 0) wait_stores_read();
}

// query [B, H, Sq, D], key [B, Hkv, Sk, D], value [B, Hkv, Sk, Dv] -> out [B, H, Sq, Dv], lse [B, H, Sq]. The first warpgroups of
// a block compute; the other warps load or schedule.
template <class T, int kDim, Variant kVariant>
__global__ __launch_bounds__(kForwardThreads<kDim, kVariant>, 1) void forward_kernel(const __grid_constant__ ForwardCall call,
                                                                                     const __grid_constant__ ForwardWork work,
                                                                                     const __grid_constant__ ForwardMaps maps) {
  constexpr ForwardShape kShape = kForwardShape<kDim, kVariant>;
  extern __shared__ __align__(1024) uint8_t shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardShared<kDim, kVariant>*>(shared_bytes);
  // Where tensor copies bring all rows, and none has to be cleared, one thread loads all keys and queries, another all values.
  const bool is_single = kVariant != Variant::kKeyBias &&
                         (is_dense(kVariant) || (!call.live_keys.gathers() && !call.live_keys.ranges && !call.p.mask.tiles.data));
  // Set up the barriers.
  if (threadIdx.x == 0) {
    // Every thread arrives for itself: one for its warp is not faster, and hides from compute-sanitizer what the others did.
    constexpr int kComputing = kShape.consumers * kWarpgroup;
    const int loaders = is_single ? 1 : kShape.loaders() + 1, loading = is_single ? 2 : 2 * kShape.loaders();
    for (int i = 0; i < kShape.query_tiles; ++i) {
      barrier_init(shared_address(&shared.query_full[i]), 1);
      barrier_init(shared_address(&shared.query_empty[i]), kComputing);
    }
    for (int i = 0; i < kShape.stages; ++i) {
      barrier_init(shared_address(&shared.key_full[i]), loaders);
      barrier_init(shared_address(&shared.value_full[i]), loaders);
      barrier_init(shared_address(&shared.key_empty[i]), kComputing);
      barrier_init(shared_address(&shared.value_empty[i]), kComputing);
      if constexpr (copies_bias(kVariant)) {
        barrier_init(shared_address(&shared.bias_full[i]), 1);
        barrier_init(shared_address(&shared.bias_empty[i]), kComputing);
      }
      if constexpr (kVariant == Variant::kKeyBias) {
        for (int half = 0; half < 2; ++half) barrier_init(shared_address(&shared.landed[half][i]), 1);
      }
    }
    for (int i = 0; i < kShape.descriptors; ++i) {
      barrier_init(shared_address(&shared.descriptor_full[i]), kShape.scheduler_threads());
      barrier_init(shared_address(&shared.descriptor_empty[i]), kComputing + loading);
    }
    fence_barrier_init();
    for (const CUtensorMap* const map : {&maps.query, &maps.key, &maps.value, &maps.out}) prefetch_map(map);
    if constexpr (copies_bias(kVariant)) prefetch_map(&maps.bias);
  }
  shared.bias_operands.set_up();
  __syncthreads();
  griddepcontrol_wait();
  // Give each warp its role.
  const int thread = static_cast<int>(threadIdx.x) - kShape.consumers * kWarpgroup;  // of those that do not compute
  if (thread < 0) {
    take_registers<kShape.computing_registers>();
    compute_tiles<T, kDim, kVariant>(call, work, maps, shared);
    return;
  }
  constexpr int kLoading = 2 * kShape.loaders();
  if (kShape.shares_warpgroup() || thread < kLoading) give_registers<kShape.loading_registers>();
  if (thread < kLoading) {
    load_tiles<kDim, kVariant>(call, work, maps, shared, thread, is_single);
  } else {
    if constexpr (!kShape.shares_warpgroup()) give_registers<kShape.scheduler_registers>();
    Scheduler<kDim, kVariant>(call, work, thread - kLoading, shared.queues, shared.descriptors,
                              shared_address(shared.descriptor_full), shared_address(shared.descriptor_empty))
        .run();
  }
}

template <class T, int kDim, Variant kVariant>
cudaError_t launch_forward(const ForwardCall& call, const ForwardWork& work, const ForwardMaps& maps, int blocks,
                           cudaStream_t stream) {
  constexpr int kBytes = sizeof(ForwardShared<kDim, kVariant>);
  static_assert(kBytes <= 227 * 1024 && is_valid(kForwardShape<kDim, kVariant>, kVariant));
  const auto kernel = forward_kernel<T, kDim, kVariant>;
  static KernelAttribute shared_bytes;
  const cudaError_t status = allow_shared_bytes(shared_bytes, kernel, kBytes);
  if (status != cudaSuccess) return status;
  return launch_dependent(kernel, static_cast<unsigned>(blocks), kForwardThreads<kDim, kVariant>, kBytes, stream, call, work,
                          maps);
}

}  // namespace dmattn::cuda::sm90
