// What the scheduler warps tell the warps that load and compute: a descriptor for each chunk of keys of a tile.
//
// Inside a descriptor, what one thread of a product or of a gather needs lies together. The functions named *_place say where.
#pragma once

#include "../common/visibility.cuh"
#include "tiles.h"

namespace dmattn::cuda::sm90 {

// What a descriptor says of its chunk.
enum Flag : uint32_t {
  kFirst = 1,      // it is the first chunk of a tile
  kLast = 2,       // it is the last chunk of a tile
  kEnd = 4,        // it is no chunk: the work is done
  kInOrder = 8,    // its keys are first_key, first_key + 1, ...; otherwise those of `index`
  kLimit = 16,     // keys before the first and causality have to be tested; only with kInOrder
  kSpans = 32,     // spans have to be tested, of gathered keys `seen` or `bits`; without kInOrder rows may be missing
  kBits = 64,      // bits have to be tested; without kInOrder rows may be missing
  kFew = 128,      // gathered keys: `seen` has to be tested for the first kFewRows rows
  kGaps = 256,     // gathered keys: rows from rows_present on are missing, Keys::kIntervals: `dead` ones; all are hidden
  kCompact = 512,  // with kInOrder: its rows are those of the compact keys; so are all chunks of the tile
  kHuge = 1024,    // set by the warps that load keys, where scores start with key_bias: some of it is beyond kHugeBias
  kStarts = 2048,  // Keys::kIntervals, with kSpans: the beginnings of spans have to be tested, too
  // Keys::kGathered, kIntervals and kUnion: computing warp 0 needs the test of kSpans or kFew; the next bits say so of the next
  // warps.
  kTested = 1 << 16,
  // Keys::kUnion: some row of computing warpgroup 0 sees a key; the next bits say so of the next warpgroups. A warpgroup of which
  // no row does leaves the chunk out, unless it is a tile's first or last.
  kSeenByFirst = 1 << 28,
};
inline constexpr int kSeenBit = 12;  // of kSeenByFirst, counted from kTested
static_assert(kSeenByFirst == kTested << kSeenBit);

constexpr int kFewRows = 32;

// Products are added to a key_bias of up to this size. Added to a larger one, too little would be left of them.
constexpr float kHugeBias = 4096.0f;

// A span as first position and length: one comparison says whether a position sees the key.
struct Seen {
  int first;
  uint32_t length;
  static __device__ __forceinline__ Seen of(Span span) {
    return {span.first, span.first < span.last ? static_cast<uint32_t>(span.last - span.first) : 0};
  }
  __device__ __forceinline__ bool sees(int position) const { return static_cast<uint32_t>(position - first) < length; }
};

// The place of a row of a chunk in `index`: every eighth row lies together.
template <int kKeys>
__device__ __forceinline__ constexpr int index_place(int row) {
  return row % 8 * (kKeys / 8) + row / 8;
}

template <int kDim, class Traits>
struct TileDescriptor {
  static constexpr int kKeys = kForwardShape<kDim, Traits>.keys, kRows = kForwardShape<kDim, Traits>.rows();
  static constexpr bool kIsDense = Traits::kIsDense;  // has no fields beyond first_key, with options key_hash
  static constexpr bool kHasBits = Traits::kTakesBlocks;
  static constexpr bool kIsGathered = Traits::kGathers, kIsUnion = Traits::kIsUnion, kHasSeen = kIsGathered && !kIsUnion;
  static constexpr bool kHasIntervals = Traits::kKeys == Keys::kIntervals;  // dense, and has span, last, dead and key_bias
  static constexpr int kDescribedRows = kIsDense && !kHasIntervals ? 4 : kKeys;
  static constexpr int kBiasWarps = Traits::kBias == Bias::kKey ? kForwardShape<kDim, Traits>.loaders() / 32 : 1;
  static_assert(kBiasWarps == 1 || kBiasWarps == 2);
  // The place of a row's key in `index`.
  static __device__ __forceinline__ constexpr int key_place(int row) {
    return Traits::kKeys == Keys::kRange ? row : index_place<kKeys>(row);
  }
  // The place of a column in key_bias. Beside a bias of pairs what a thread of a product holds of two tiles of 8 columns lies
  // together. Where products start with key_bias columns keep their order: a thread reads two neighbours into the scores that
  // it adds to them.
  static __device__ __forceinline__ constexpr int bias_place(int column) {
    return Traits::kBias == Bias::kKey ? column : column / 16 * 16 + column % 8 / 2 * 4 + column % 16 / 8 * 2 + column % 2;
  }
  // The place of a column in `seen`: what a thread of a product has to know of its columns lies together, two neighbours in a
  // word.
  static __device__ __forceinline__ constexpr int seen_place(int column) {
    return column % 8 / 2 * (kKeys / 4) + column / 8 * 2 + column % 2;
  }
  uint32_t flags;
  union {
    int first_key;     // with kInOrder: the row of the first key in the tensor that is copied, key or the compact keys
    int rows_present;  // without it, of gathered keys: how many rows the chunk has; of unions all or none
  };
  int batch, head, first_query;  // of the tile: the first of its heads
  // Without kInOrder: the key; of a missing row -1, of gathered keys 0, of unions the last key again. By index_place, of
  // Keys::kRange by row.
  alignas(16) int32_t index[kHasIntervals ? 4 : kDescribedRows];
  alignas(16) Seen span[kIsGathered ? 1 : kDescribedRows];
  // Keys::kIntervals, with kSpans: the position behind the last that sees the key. With kGaps: a bit for each key that no query
  // of the tile sees.
  alignas(16) int32_t last[kHasIntervals ? kKeys : 1];
  uint32_t dead[kHasIntervals ? (kKeys + 31) / 32 : 1];
  // By bias_place. Of gathered keys divided by the scale, except where has_huge is set, and -inf for rows that are not loaded.
  // With kMultipliesBias only where has_huge is set.
  alignas(16) float key_bias[kDescribedRows];
  alignas(16) uint32_t key_hash[Traits::kHasOptions ? kKeys : 1];  // with dropout: dropout_key_hash of each key
  // Is some key_bias beyond kHugeBias? For each warp that loads keys, which take 32 rows after the other.
  bool has_huge[kBiasWarps];
  // By query of the tile, a bit for each key that it sees.
  alignas(8) uint32_t bits[kHasBits || kIsUnion ? kRows : 1][kHasBits || kIsUnion ? kKeys / 32 : 1];
  // Of other gathered keys, by warp and seen_place: a bit for each of the warp's 16 rows of the tile, whether it sees the key.
  alignas(kHasSeen ? 16 : 2) uint16_t seen[kHasSeen ? kRows / 16 : 1][kHasSeen ? kDescribedRows : 1];
};

}  // namespace dmattn::cuda::sm90
