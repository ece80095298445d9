// From products to logits, and the weights that dropout keeps. Matrices are [keys, queries], so a lane is a query.
//
// With queries in the lanes a running maximum needs no reduction across lanes, and neither keys nor probabilities have to be
// transposed.
#pragma once

#include "mask.h"
#include "vecmath.h"

namespace dmattn::cpu {
namespace {

// What turns the products of a query tile into logits. A pointer is null where the argument is not given.
template <class R>
struct LogitTerms {
  R softcap;
  const R* key_bias;  // [Sk]
  const char* bias;   // [rows of the tile, Sk], bias_type, bias_stride elements apart
  DType bias_type;
  int64_t bias_stride;
};

template <class R>
DMATTN_INLINE LogitTerms<R> logit_terms(const AttentionParams& p, const QueryTile& tile) {
  LogitTerms<R> terms = {static_cast<R>(p.softcap), nullptr, nullptr, p.bias_dtype, p.bias_row_stride};
  if (p.key_bias.data) terms.key_bias = static_cast<const R*>(p.key_bias.data) + head_offset(p.key_bias, tile.batch, tile.head);
  if (p.bias.data) {
    const int64_t offset = head_offset(p.bias, tile.batch, tile.head) + tile.first * p.bias_row_stride;
    terms.bias = static_cast<const char*>(p.bias.data) + offset * element_size(p.bias_dtype);
  }
  return terms;
}

// to[k][i] = bias[i][keys[k]]
template <class R>
void gather_bias(const LogitTerms<R>& terms, const KeyChunk& chunk, int64_t rows, const Matrix<R>& to) {
  for (int64_t k = 0; k < chunk.count; ++k) {
    for (int64_t i = rows; i < padded<R>(rows); ++i) to.row(k)[i] = 0;
  }
  with_stored(terms.bias_type, R(), [&](auto stored) {
    const auto* row = reinterpret_cast<const typename decltype(stored)::Element*>(terms.bias);
    for (int64_t i = 0; i < rows; ++i, row += terms.bias_stride) {
      for (int64_t k = 0; k < chunk.count; ++k) to.row(k)[i] = stored.widen(row[chunk.keys[k]]);
    }
  });
}

// x -> softcap * tanh(x / softcap); slope, where given, gets the derivative.
template <class R>
void cap(R softcap, int64_t count, int64_t width, const Matrix<R>& logits, const Matrix<R>& slope) {
  const R inverse = R(1) / softcap;
  for (int64_t k = 0; k < count; ++k) {
    for (int64_t i = 0; i < width; i += kLanes<R>) {
      const Vec<R> t = tanh_of<R>(load<R>(logits.row(k) + i) * inverse);
      store<R>(logits.row(k) + i, t * softcap);
      if (slope.data) store<R>(slope.row(k) + i, R(1) - t * t);
    }
  }
}

// The lanes from query i on whose bit is set in the words of a row mask.
template <class R>
DMATTN_INLINE IntVec<R> lanes_in(const uint32_t* words, int64_t i) {
  using Word = decltype(BitVec<R>{}[0] + 0);
  const Word word = words[i / 32] >> (i % 32);
  const BitVec<R> bit = (BitVec<R>{} + 1) << lane_numbers<R>();
  return (bit & (BitVec<R>{} + word)) != 0;
}

template <class R>
void hide(const KeyChunk& chunk, int64_t width, const Matrix<R>& logits) {
  for (int64_t k = chunk.full; k < chunk.count; ++k) {
    for (int64_t i = 0; i < width; i += kLanes<R>) {
      const Vec<R> visible = load<R>(logits.row(k) + i), hidden = splat<R>(static_cast<R>(-kInfinity));
      store<R>(logits.row(k) + i, lanes_in<R>(chunk.masks[k].words, i) ? visible : hidden);
    }
  }
}

// Products to logits, in place. `bias` is room for a matrix like logits; `slope` as in cap, without data when not wanted.
template <class R>
void finish_logits(const LogitTerms<R>& terms, const KeyChunk& chunk, int64_t rows, const Matrix<R>& logits,
                   const Matrix<R>& bias, const Matrix<R>& slope) {
  const int64_t width = padded<R>(rows);
  if (terms.softcap > 0) cap<R>(terms.softcap, chunk.count, width, logits, slope);
  if (terms.bias) gather_bias<R>(terms, chunk, rows, bias);
  if (terms.key_bias || terms.bias) {
    for (int64_t k = 0; k < chunk.count; ++k) {
      const Vec<R> key_bias = splat<R>(terms.key_bias ? terms.key_bias[chunk.keys[k]] : R(0));
      for (int64_t i = 0; i < width; i += kLanes<R>) {
        const Vec<R> logit = load<R>(logits.row(k) + i) + key_bias;
        store<R>(logits.row(k) + i, terms.bias ? logit + load<R>(bias.row(k) + i) : logit);
      }
    }
  }
  hide<R>(chunk, width, logits);
}

template <class R>
struct HashWordsOf {
  typedef uint32_t Type __attribute__((vector_size(kLanes<R> * 4)));
};
template <class R>
using HashWords = typename HashWordsOf<R>::Type;  // one uint32_t for each lane of a Vec<R>

// What dropout multiplies weights by, from the hash of params.h.
template <class R>
struct DropoutScale {
  bool active;
  uint32_t threshold;
  R factor;  // 1 / (1 - p)

  DMATTN_INLINE explicit DropoutScale(const AttentionParams& p) : active(p.dropout_p > 0), threshold(0), factor(1) {
    if (!active) return;
    threshold = dropout_threshold(p.dropout_p);
    factor = static_cast<R>(1.0 / (1.0 - p.dropout_p));
  }

  // For x = row key ^ key * 0x9e3779b9: factor where the key is kept, otherwise 0. This is dropout_keeps of params.h for a whole
  // vector.
  DMATTN_INLINE Vec<R> of(HashWords<R> x) const {
    x = (x ^ (x >> 16)) * 0x7feb352dU;
    x = (x ^ (x >> 15)) * 0x846ca68bU;
    const IntVec<R> kept = __builtin_convertvector(x >= threshold, IntVec<R>);
    return kept ? splat<R>(factor) : Vec<R>{};
  }
};

// Which weights of a tile dropout keeps: the hash of params.h, with a row key for each query.
template <class R>
struct Dropout : DropoutScale<R> {
  uint32_t row_keys[kMaxTileQueries];

  DMATTN_INLINE Dropout(const AttentionParams& p, const QueryTile& tile) : DropoutScale<R>(p) {
    if (!this->active) return;
    const uint32_t batch_head = static_cast<uint32_t>(tile.batch * p.heads + tile.head);
    for (int64_t i = 0; i < kMaxTileQueries; ++i) {
      row_keys[i] = dropout_row_key(static_cast<uint64_t>(*p.dropout_seed), batch_head, static_cast<uint32_t>(tile.first + i));
    }
  }

  // For the lanes from query i on.
  DMATTN_INLINE Vec<R> scales(int32_t key, int64_t i) const {
    HashWords<R> x;
    __builtin_memcpy(&x, row_keys + i, sizeof(x));
    return this->of(x ^ static_cast<uint32_t>(key) * 0x9e3779b9U);
  }
};

}  // namespace
}  // namespace dmattn::cpu
