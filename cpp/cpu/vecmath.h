// exp and tanh of a vector, accurate to about one unit in the last place (two for tanh).
#pragma once

#include "vec.h"

namespace dmattn::cpu {
namespace {

// exp(x) = 2^n exp(r) with |r| <= ln(2) / 2, and exp(r) by the polynomial 1 + r + r^2 q(r), which has the smallest largest
// relative error of its degree: 3e-9 for float, 8e-18 for double.
template <class R>
struct ExpTable;

template <>
struct ExpTable<float> {
  static constexpr float kLog2E = 1.44269504F, kLn2High = 0.693359375F, kLn2Low = -2.12194440e-4F;
  static constexpr float kRound = 12582912.0F + 127.0F;  // adding it leaves n + 127 in the low bits
  static constexpr float kLowest = -87.3F;               // below: 0
  static constexpr int kMantissa = 23, kTerms = 5;
  static constexpr float kTerm[kTerms] = {0.4999999343F, 0.166665204F, 0.04166839078F, 0.008368745109F, 0.001381454018F};
};

template <>
struct ExpTable<double> {
  static constexpr double kLog2E = 1.4426950408889634, kLn2High = 0.693147180369123816490, kLn2Low = 1.90821492927058770002e-10;
  static constexpr double kRound = 6755399441055744.0 + 1023.0;
  static constexpr double kLowest = -708.3;
  static constexpr int kMantissa = 52, kTerms = 10;
  static constexpr double kTerm[kTerms] = {
      0.50000000000000066,    0.16666666666666141,   0.041666666666563492, 0.0083333333336945176, 0.0013888888935252412,
      0.00019841269034914515, 2.4801501324062637e-5, 2.755803118440056e-6, 2.7627483226770665e-7, 2.4854333090977858e-8};
};

// exp(x): 0 where that is below the smallest normal number, also for -inf; NaN for NaN. For x above 88, or 709 for double, the
// result means nothing.
template <class R>
DMATTN_INLINE Vec<R> exp_of(Vec<R> x) {
  using T = ExpTable<R>;
  const Vec<R> shifted = x * T::kLog2E + T::kRound;
  const Vec<R> n = shifted - T::kRound;
  const Vec<R> r = (x - n * T::kLn2High) - n * T::kLn2Low;
  Vec<R> q = splat<R>(T::kTerm[T::kTerms - 1]);
  DMATTN_UNROLL
  for (int i = T::kTerms - 2; i >= 0; --i) q = q * r + T::kTerm[i];
  const Vec<R> power = (Vec<R>)((BitVec<R>)shifted << T::kMantissa);
  const Vec<R> result = ((q * r) * r + (r + R(1))) * power;
  return x < T::kLowest ? Vec<R>{} : result;
}

// Lambert's continued fraction x / (1 + x^2 / (3 + x^2 / (5 + ...))) as a quotient of two polynomials, exact to rounding for |x|
// < 0.7.
template <class R>
DMATTN_INLINE Vec<R> small_tanh(Vec<R> x) {
  constexpr int kDepth = sizeof(R) == 8 ? 9 : 5;
  const Vec<R> x2 = x * x;
  Vec<R> top_before = Vec<R>{}, top = splat<R>(1), bottom_before = splat<R>(1), bottom = splat<R>(1);
  DMATTN_UNROLL
  for (int i = 1; i < kDepth; ++i) {
    const Vec<R> next_top = top * R(2 * i + 1) + top_before * x2, next_bottom = bottom * R(2 * i + 1) + bottom_before * x2;
    top_before = top, top = next_top;
    bottom_before = bottom, bottom = next_bottom;
  }
  return x * top / bottom;
}

template <class R>
DMATTN_INLINE Vec<R> tanh_of(Vec<R> x) {
  const Vec<R> size = x < R(0) ? -x : x;
  const Vec<R> bounded = size > R(20) ? splat<R>(20) : size;  // tanh(20) rounds to 1; NaN stays
  const Vec<R> large = R(1) - R(2) / (exp_of<R>(bounded + bounded) + R(1));
  const Vec<R> signed_large = x < R(0) ? -large : large;
  return size < R(0.65) ? small_tanh<R>(x) : signed_large;
}

}  // namespace
}  // namespace dmattn::cpu
