#pragma once
// Powers and logarithms of 2, computed with + - * / alone: the math libraries of host and device
// differ in the last bit, and the loss scale must be the same on both.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/macros.h"

namespace amp_mp {

AMP_MP_BOTH double double_of(uint64_t bits) {
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// x finite and above 0. 2 atanh((m - 1) / (m + 1)) = ln m by its series, m in [1/sqrt 2, sqrt 2]:
// the last term is below 2^-58 of the first.
AMP_MP_BOTH double log2_of(double x) {
  int exponent = 0;
  if (x < 0x1p-1022) {  // subnormal
    x *= 0x1p54;
    exponent = -54;
  }
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  exponent += int(bits >> 52) - 1023;
  double m = double_of((bits & ((uint64_t(1) << 52) - 1)) | uint64_t(1023) << 52);
  if (m > 1.4142135623730951) {
    m *= 0.5;
    exponent += 1;
  }
  const double s = (m - 1) / (m + 1), z = s * s;
  double series = 0;
  for (int k = 23; k >= 1; k -= 2) series = series * z + 1.0 / k;
  return exponent + 2.885390081777926815 * s * series;  // 2 / ln 2
}

// Taylor's series of exp on [-ln 2 / 2, ln 2 / 2].
AMP_MP_BOTH double exp2_of(double y) {
  if (!(y < 1024)) return HUGE_VAL;
  if (y < -1022) return 0;
  const double whole = floor(y + 0.5), t = (y - whole) * 0.693147180559945309;
  double series = 1;
  for (int k = 14; k >= 1; --k) series = 1 + series * t / k;
  const int exponent = int(whole);  // up to 1024, in two factors
  const int half = exponent / 2;
  return series * double_of(uint64_t(1023 + half) << 52) *
         double_of(uint64_t(1023 + exponent - half) << 52);
}

}  // namespace amp_mp
