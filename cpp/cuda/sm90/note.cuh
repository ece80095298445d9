// What the warps that walk tell those that load and compute: a note per chunk of keys.
//
// The one surprise is the order inside: what one thread of a product, or of a gather, needs lies together, hence the places.
#pragma once

#include "../common/visibility.cuh"
#include "tiles.h"

namespace dmattn::cuda::sm90 {

// What a note says of its chunk.
enum Flag : uint32_t {
  kFirst = 1,         // of a tile
  kLast = 2,          // of a tile
  kEnd = 4,           // no chunk at all: the work is done
  kInOrder = 8,       // keys first_key, first_key + 1, ...; otherwise those of `index`
  kLimit = 16,        // needs a test against the first key and causality; in order only
  kSpans = 32,        // needs a test of spans, in the gathered variant of `seen`; where it is not in order, rows may be missing
  kBits = 64,         // needs a test of bits; the same
  kFew = 128,         // gathered variant only: the first kFewRows rows need a test of `seen`
  kGaps = 256,        // the same: rows from rows_present on are missing; key_bias hides them, or a test
  kCompact = 512,     // in order, places in the compact copies instead of keys; all chunks of a tile, or none
  kHuge = 1024,       // gathered variant, added by who loads keys: some key_bias is beyond kHugeBias
  kTested = 1 << 16,  // gathered variant, and the next bits: which computing warps need the test of kSpans or kFew
};

constexpr int kFewRows = 32;

// Up to this size a key_bias may be what products are added to; of a larger one too little would be left of the products.
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

// Where the key of a row of a chunk lies: those of every eighth row lie together.
template <int kKeys>
__device__ __forceinline__ constexpr int index_place(int row) {
  return row % 8 * (kKeys / 8) + row / 8;
}

template <int kDim, Variant kVariant>
struct Note {
  static constexpr int kKeys = kForwardShape<kDim, kVariant>.keys, kRows = kForwardShape<kDim, kVariant>.rows();
  static constexpr bool kIsDense = kVariant == Variant::kDense;                  // first_key says it all
  static constexpr bool kHasBits = !kIsDense && kVariant != Variant::kGathered;  // live keys are listed without bits
  static constexpr bool kIsGathered = kVariant == Variant::kGathered;
  static constexpr int kRowNotes = kIsDense ? 4 : kKeys;
  static constexpr int kBiasWarps = kIsGathered ? kForwardShape<kDim, kVariant>.loaders() / 32 : 1;
  static_assert(kBiasWarps == 1 || kBiasWarps == 2);
  // Where the key_bias of a column lies. In the general variant what a thread of a product holds of two tiles of 8 columns lies
  // together; in the gathered one it reads neighbours into where it adds to them.
  static __device__ __forceinline__ constexpr int bias_place(int column) {
    return kIsGathered ? column : column / 16 * 16 + column % 8 / 2 * 4 + column % 16 / 8 * 2 + column % 2;
  }
  // What a thread of a product has to know of its columns lies together, two neighbours in a word.
  static __device__ __forceinline__ constexpr int seen_place(int column) {
    return column % 8 / 2 * (kKeys / 4) + column / 8 * 2 + column % 2;
  }
  uint32_t flags;
  union {
    int first_key;     // kInOrder: the first key; with kCompact, its place among the compact keys
    int rows_present;  // otherwise, in the gathered variant: how many rows are there
  };
  int batch, head, first_query;          // of the tile: the first of its heads
  alignas(16) int32_t index[kRowNotes];  // by index_place; not in order: the key; for none -1, in the gathered variant 0
  alignas(16) Seen span[kIsGathered ? 1 : kRowNotes];
  // The gathered variant: over the scale, but as it is where has_huge says so; -inf for rows that are missing.
  alignas(16) float key_bias[kRowNotes];
  bool has_huge[kBiasWarps];  // is a key_bias beyond kHugeBias? By warp that loads keys: 32 rows in turn.
  uint32_t bits[kHasBits ? kRows : 1][kHasBits ? kKeys / 32 : 1];  // by query of the tile
  // The gathered variant: which of a warp's 16 rows of the tile see a key, by seen_place.
  alignas(kIsGathered ? 16 : 2) uint16_t seen[kIsGathered ? kRows / 16 : 1][kIsGathered ? kRowNotes : 1];
};

}  // namespace dmattn::cuda::sm90
