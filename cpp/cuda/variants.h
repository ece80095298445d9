// What a kernel instance can do at compile time, and what of it a call needs. Plain C++: the host plans with it where there is no
// CUDA.
#pragma once

#include "../params.h"

namespace dmattn::cuda {

// What a kernel instance can do at compile time; everything else is a run-time flag.
enum class Variant : int32_t {
  kPlain,     // keys in order: full, causal, block masks (and intervals beside them); nothing added to the logits
  kGathered,  // live keys, gathered from lists; key_bias
  kGeneral,   // both, and bias, softcap, dropout, any scale
  kDense,     // all keys, or causal ones, and nothing else; only where a family has more for them than kPlain
  // Those before with softcap, dropout or both, in backward also with key_bias; only where a family has them.
  kDenseOptions,
  kPlainOptions,
  kGatheredOptions,
  kPlainBias,  // backward: kPlain with bias, key_bias and dropout
  kDenseBias,  // forward: kDense with a bias that tensor copies can bring, and dropout; only where a family has it
  kKeyBias,    // keys in order, intervals or not, with key_bias; no block masks
  kRange,  // forward: keys in order, from the first to the last that LiveKeys::ranges gives, and intervals; only where a family
           // has it
  kCappedBias,  // backward: kPlainBias with softcap
};

// The variant that does what the call needs and the least beyond it.
inline Variant variant_of(const AttentionParams& p, bool is_gathered) {
  const bool is_simple = p.scale >= 1e-6 && p.softcap == 0 && p.dropout_p == 0 && !p.bias.data;
  if (is_simple && is_gathered) return Variant::kGathered;
  return is_simple && !p.key_bias.data ? Variant::kPlain : Variant::kGeneral;
}

}  // namespace dmattn::cuda
