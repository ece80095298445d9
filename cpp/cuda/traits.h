// What a kernel instance is compiled for: its traits. Everything else of a call is a run-time flag. Plain C++: the host plans
// with traits where there is no CUDA.
#pragma once

#include "../params.h"

namespace dmattn::cuda {

// Which keys an instance takes. A new source of keys is a value here, its properties below, and rows of cmake/instances.cmake
// and of the tile tables.
enum class Keys : int32_t {
  kAll,         // all keys in order, or by causality the first ones
  kIntervals,   // those, and intervals are tested where the call has them
  kRange,       // intervals: keys in order from the first to the last that LiveKeys::ranges gives
  kInOrder,     // those before, or the tiles of a block mask, and intervals beside them
  kGathered,    // live keys, gathered row by row
  kUnion,       // index lists: for each tile of queries the keys that some of them list, gathered row by row
  kQueryLists,  // index lists of blocks: keys in order, and for each tile of them the queries that list some, gathered row by row
  kAny,         // kInOrder, or kGathered where the call has lists
};

struct KeyProperties {
  bool gathers;       // keys are gathered, whatever the call
  bool may_gather;    // lists of live keys are read, if only where a call has them
  bool takes_blocks;  // there may be a block mask
  bool is_dense;      // keys come in order, and neither lists, ranges nor a block mask leave any out
};

// clang-format off
constexpr KeyProperties properties_of(Keys keys) {
  switch (keys) {
    //                               gathers  may_gather  takes_blocks  is_dense
    case Keys::kAll:       return {    false,      false,        false,     true};
    case Keys::kIntervals: return {    false,      false,        false,     true};
    case Keys::kRange:     return {    false,      false,        false,    false};
    case Keys::kInOrder:   return {    false,      false,         true,    false};
    case Keys::kGathered:  return {     true,       true,        false,    false};
    case Keys::kUnion:     return {     true,       true,        false,    false};
    case Keys::kQueryLists: return {   false,      false,        false,    false};
    case Keys::kAny:       return {    false,       true,         true,    false};
  }
  return {};
}
// clang-format on

// What becomes of a product before it is a weight.
enum class Logits : int32_t {
  kScaled,   // it is scaled
  kDropout,  // and its weight may be dropped
  kCapped,   // the same, and there may be a softcap
  kAny,      // any scale, dropout, and a softcap by an exact tanh, which takes longer
};

// Options: dropout, or dropout and softcap, in instances that lose little time by them.
constexpr bool has_options(Logits logits) { return logits == Logits::kDropout || logits == Logits::kCapped; }

// What is added to logits.
enum class Bias : int32_t {
  kNone,
  kKey,     // key_bias
  kPair,    // key_bias, and bias, which single pairs have
  kCopied,  // bias alone, which tensor copies bring
};

// As the host names them.
struct InstanceTraits {
  Keys keys = Keys::kAll;
  Logits logits = Logits::kScaled;
  Bias bias = Bias::kNone;
};

constexpr bool operator==(const InstanceTraits& a, const InstanceTraits& b) {
  return a.keys == b.keys && a.logits == b.logits && a.bias == b.bias;
}
constexpr bool operator!=(const InstanceTraits& a, const InstanceTraits& b) { return !(a == b); }

// The same as a type, the `Traits` of kernels.
template <Keys kKeysOf, Logits kLogitsOf, Bias kBiasOf>
struct KernelTraits {
  static constexpr Keys kKeys = kKeysOf;
  static constexpr Logits kLogits = kLogitsOf;
  static constexpr Bias kBias = kBiasOf;
  static constexpr InstanceTraits kValue = {kKeys, kLogits, kBias};
  static constexpr bool kGathers = properties_of(kKeys).gathers, kMayGather = properties_of(kKeys).may_gather,
                        kTakesBlocks = properties_of(kKeys).takes_blocks, kIsDense = properties_of(kKeys).is_dense;
  static constexpr bool kIsUnion = kKeys == Keys::kUnion, kMayBeUnion = kIsUnion || kKeys == Keys::kAny;
  static constexpr bool kGathersQueries = kKeys == Keys::kQueryLists;
  static constexpr bool kMayDrop = kLogits != Logits::kScaled;
  static constexpr bool kHasOptions = has_options(kLogits);
};

// What serves every call.
inline constexpr InstanceTraits kGeneralTraits = {Keys::kAny, Logits::kAny, Bias::kPair};
// What serve calls without options, and with no bias or a key_bias alone.
inline constexpr InstanceTraits kDenseTraits = {Keys::kAll, Logits::kScaled, Bias::kNone},
                                kPlainTraits = {Keys::kInOrder, Logits::kScaled, Bias::kNone},
                                kKeyBiasTraits = {Keys::kIntervals, Logits::kScaled, Bias::kKey},
                                kGatheredTraits = {Keys::kGathered, Logits::kScaled, Bias::kKey},
                                kUnionTraits = {Keys::kUnion, Logits::kScaled, Bias::kKey};

// kPlainTraits, kGatheredTraits (kUnionTraits where the call has index lists) or kGeneralTraits: those that do what the call
// needs and the least beyond it.
inline InstanceTraits traits_of(const AttentionParams& p, bool is_gathered) {
  const bool is_simple = p.scale >= 1e-6 && p.softcap == 0 && p.dropout_p == 0 && !p.bias.data;
  if (is_simple && is_gathered) return p.mask.index.entries.data ? kUnionTraits : kGatheredTraits;
  return is_simple && !p.key_bias.data ? kPlainTraits : kGeneralTraits;
}

}  // namespace dmattn::cuda
