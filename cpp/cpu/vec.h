// One vector register as a type, written with the vector extensions of GCC and Clang, so that one source serves every instruction
// set.
//
// This header and all that kernels.cpp includes are in an unnamed namespace on purpose. kernels.cpp is compiled once for each
// instruction set, and of functions with external linkage the linker would keep one version for all, perhaps that with AVX-512.
// For the same reason nothing that kernels.cpp includes uses templates of std::.
#pragma once

#include <stdint.h>

#ifdef __SSE2__
#include <immintrin.h>
#endif

#define DMATTN_INLINE inline __attribute__((always_inline))
#define DMATTN_UNROLL _Pragma("GCC unroll 16")

namespace dmattn::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class R>
struct VectorOf;

template <>
struct VectorOf<float> {
  typedef float Real __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Int __attribute__((vector_size(kVectorBytes)));
  typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
};

template <>
struct VectorOf<double> {
  typedef double Real __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Int __attribute__((vector_size(kVectorBytes)));
  typedef uint64_t Bits __attribute__((vector_size(kVectorBytes)));
};

template <class R>
using Vec = typename VectorOf<R>::Real;
template <class R>
using IntVec = typename VectorOf<R>::Int;  // what comparing two Vec<R> gives: -1 or 0 per lane
template <class R>
using BitVec = typename VectorOf<R>::Bits;
using Int32Vec = IntVec<float>;

template <class R>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(R));

constexpr double kInfinity = __builtin_huge_val();

template <class R>
DMATTN_INLINE Vec<R> load(const R* from) {
  Vec<R> v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

template <class R>
DMATTN_INLINE void store(R* to, Vec<R> v) {
  __builtin_memcpy(to, &v, sizeof(v));
}

template <class R>
DMATTN_INLINE Vec<R> splat(R x) {
  return x - Vec<R>{};
}

DMATTN_INLINE Int32Vec load_int32(const int32_t* from) {
  Int32Vec v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

// The larger lane; `b` where either is NaN.
template <class R>
DMATTN_INLINE Vec<R> max_of(Vec<R> a, Vec<R> b) {
  return a > b ? a : b;
}

// The sum of the lanes, added in pairs and always in the same order.
template <class R>
DMATTN_INLINE R sum_lanes(Vec<R> v) {
  R lanes[kLanes<R>];
  store<R>(lanes, v);
  for (int width = kLanes<R> / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// The largest lane of a vector without NaN.
template <class R>
DMATTN_INLINE R max_lanes(Vec<R> v) {
  R lanes[kLanes<R>];
  store<R>(lanes, v);
  for (int width = kLanes<R> / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  }
  return lanes[0];
}

// Lane numbers 0, 1, 2, ...
template <class R>
DMATTN_INLINE BitVec<R> lane_numbers() {
  BitVec<R> v;
  for (int i = 0; i < kLanes<R>; ++i) v[i] = static_cast<unsigned>(i);
  return v;
}

// Bit i is set when lane i of a comparison's result is.
DMATTN_INLINE uint32_t lane_bits(Int32Vec mask) {
#if defined(__AVX512DQ__)
  return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)mask));
#elif defined(__SSE2__)
  return static_cast<uint32_t>(_mm_movemask_ps((__m128)mask));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes<float>; ++i) bits |= (static_cast<uint32_t>(mask[i]) & 1U) << i;
  return bits;
#endif
}

DMATTN_INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
DMATTN_INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
DMATTN_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
DMATTN_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// n rounded up to whole vectors.
template <class R>
DMATTN_INLINE int64_t padded(int64_t n) {
  return round_up(n, kLanes<R>);
}

// The distance of rows of n values in a matrix: whole vectors, and one cache line more so that rows do not all fall into the same
// cache sets.
template <class R>
DMATTN_INLINE int64_t row_stride_of(int64_t n) {
  return round_up(n, kLanes<R>) + 64 / static_cast<int64_t>(sizeof(R));
}

}  // namespace
}  // namespace dmattn::cpu
