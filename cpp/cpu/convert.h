// Rows of any dtype become rows of the type that arithmetic is done in, and the other way round: eight elements at a time, since
// D and Dv are multiples of eight.
#pragma once

#include "../params.h"
#include "vec.h"

namespace dmattn::cpu {
namespace {

constexpr int kStep = 8;
typedef float Float8 __attribute__((vector_size(32)));
typedef double Double8 __attribute__((vector_size(64)));
typedef uint32_t Bits8 __attribute__((vector_size(32)));
typedef uint16_t Half8 __attribute__((vector_size(16)));  // eight bfloat16 or float16

DMATTN_INLINE int64_t element_size(DType type) { return type == DType::kFloat64 ? 8 : type == DType::kFloat32 ? 4 : 2; }

template <class V>
DMATTN_INLINE V load_as(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

DMATTN_INLINE Float8 widen_bfloat16(Half8 v) { return (Float8)(__builtin_convertvector(v, Bits8) << 16); }

// Rounds to nearest, ties to even; NaN stays NaN.
DMATTN_INLINE Half8 narrow_bfloat16(Float8 v) {
  const Bits8 bits = (Bits8)v;
  const Bits8 rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
  const Bits8 quiet = (bits >> 16) | 0x40U;
  return __builtin_convertvector((Bits8)(v == v ? rounded : quiet), Half8);
}

#ifdef __F16C__
DMATTN_INLINE Float8 widen_float16(Half8 v) { return (Float8)_mm256_cvtph_ps((__m128i)v); }
DMATTN_INLINE Half8 narrow_float16(Float8 v) { return (Half8)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT); }
#else
// Moved to their places in a float, a float16's exponent and mantissa are a number 2^112 times too small, also of subnormal
// numbers.
DMATTN_INLINE Float8 widen_float16(Half8 v) {
  const Bits8 bits = __builtin_convertvector(v, Bits8);
  const Bits8 sign = (bits & 0x8000U) << 16, size = (bits & 0x7fffU) << 13;
  const Bits8 finite = (Bits8)((Float8)size * 0x1p112F);
  const Bits8 special = size | 0x7f800000U;
  return (Float8)(((bits & 0x7c00U) == 0x7c00U ? special : finite) | sign);
}

// There are three ranges: inf and NaN; numbers below 2^-14, which adding 0.5 rounds to the last place of a subnormal number; and
// the rest, which an addition of integers rounds.
DMATTN_INLINE Half8 narrow_float16(Float8 v) {
  const Bits8 bits = (Bits8)v, size = bits & 0x7fffffffU, sign = (bits >> 16) & 0x8000U;
  const Bits8 nan = ((size >> 13) & 0x3ffU) | 0x7e00U;
  const Bits8 infinite = size > 0x7f800000U ? nan : Bits8{} + 0x7c00U;
  const Bits8 subnormal = (Bits8)((Float8)size + 0.5F) - 0x3f000000U;
  const Bits8 normal = (size - 0x38000000U + 0xfffU + ((size >> 13) & 1U)) >> 13;
  const Bits8 finite = size < 0x38800000U ? subnormal : normal;
  return __builtin_convertvector((size >= 0x47800000U ? infinite : finite) | sign, Half8);
}
#endif

// The dtypes as types: what is stored, what it is computed in, eight elements at once.
struct StoredFloat64 {
  using Element = double;
  DMATTN_INLINE static double widen(double x) { return x; }
  DMATTN_INLINE static Double8 load(const double* from) { return load_as<Double8>(from); }
  DMATTN_INLINE static void store(double* to, Double8 v) { __builtin_memcpy(to, &v, sizeof(v)); }
};

struct StoredFloat32 {
  using Element = float;
  DMATTN_INLINE static float widen(float x) { return x; }
  DMATTN_INLINE static Float8 load(const float* from) { return load_as<Float8>(from); }
  DMATTN_INLINE static void store(float* to, Float8 v) { __builtin_memcpy(to, &v, sizeof(v)); }
};

struct StoredBFloat16 {
  using Element = uint16_t;
  DMATTN_INLINE static float widen(uint16_t x) { return widen_bfloat16(Half8{x})[0]; }
  DMATTN_INLINE static Float8 load(const uint16_t* from) { return widen_bfloat16(load_as<Half8>(from)); }
  DMATTN_INLINE static void store(uint16_t* to, Float8 v) {
    const Half8 narrow = narrow_bfloat16(v);
    __builtin_memcpy(to, &narrow, sizeof(narrow));
  }
};

struct StoredFloat16 {
  using Element = uint16_t;
  DMATTN_INLINE static float widen(uint16_t x) { return widen_float16(Half8{x})[0]; }
  DMATTN_INLINE static Float8 load(const uint16_t* from) { return widen_float16(load_as<Half8>(from)); }
  DMATTN_INLINE static void store(uint16_t* to, Float8 v) {
    const Half8 narrow = narrow_float16(v);
    __builtin_memcpy(to, &narrow, sizeof(narrow));
  }
};

// Calls use(a Stored type). Only those types are compiled whose arithmetic is done in double, or in float.
template <class Use>
DMATTN_INLINE void with_stored(DType, double, const Use& use) {
  use(StoredFloat64());
}

template <class Use>
DMATTN_INLINE void with_stored(DType type, float, const Use& use) {
  switch (type) {
    case DType::kBFloat16: return use(StoredBFloat16());
    case DType::kFloat16: return use(StoredFloat16());
    default: return use(StoredFloat32());
  }
}

// to[0, n) = from[0, n), to[n, width) = 0
template <class Stored, class R>
DMATTN_INLINE void widen_row(const char* from, R* to, int64_t n, int64_t width) {
  const auto* elements = reinterpret_cast<const typename Stored::Element*>(from);
  for (int64_t i = 0; i < n; i += kStep) {
    const auto v = Stored::load(elements + i);
    __builtin_memcpy(to + i, &v, sizeof(v));
  }
  for (int64_t i = n; i < width; ++i) to[i] = 0;
}

// to[0, n) = from[0, n) * factor in the dtype
template <class R>
DMATTN_INLINE void narrow_row(DType type, const R* from, R factor, char* to, int64_t n) {
  with_stored(type, R(), [&](auto stored) {
    using Stored = decltype(stored);
    auto* elements = reinterpret_cast<typename Stored::Element*>(to);
    for (int64_t i = 0; i < n; i += kStep)
      Stored::store(elements + i, load_as<decltype(Stored::load(elements))>(from + i) * factor);
  });
}

DMATTN_INLINE char* row_at(const TensorView& tensor, DType type, int64_t batch, int64_t head, int64_t row) {
  return static_cast<char*>(tensor.data) +
         (batch * tensor.batch_stride + head * tensor.head_stride + row * tensor.row_stride) * element_size(type);
}

}  // namespace
}  // namespace dmattn::cpu
