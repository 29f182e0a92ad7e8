#pragma once
// First moments in one byte: groups of 32 neighbours share a bfloat16 scale, not below their
// largest magnitude, and a code q of [-127, 127] means scale * (q / 127)^3.
//
// The cube spans 6 decades. With less companding the smallest code is far above the smallest
// moments of a mixed group, while the second moment, exact to 1/512, knows how small they are: the
// quotient, Adam's update, then comes out tens of times too large. Stochastic rounding lets a code
// that no longer gets gradients decay, which the nearest code would never do.
#include "core/formats.h"

namespace amp_mp {

constexpr int kGroup = 32;

// Rounded up, so that no code exceeds 127. A group below 2^-80 is zero: the inverse has to be
// finite.
AMP_MP_BOTH bfloat16 m8_scale(uint32_t largest_magnitude) {
  const uint32_t u = largest_magnitude < 0x7FC00000u ? largest_magnitude : 0x7FC00000u;
  return {uint16_t(u < (47u << 23) ? 0 : (u + 0xFFFFu) >> 16)};
}

// What a group's codes are decoded with, scale / 127^3, a little less so that 127 is the scale at
// most; and encoded with, (127 * 256)^3 / scale.
AMP_MP_BOTH float m8_step(float scale) { return scale * 4.8818978e-07f; }
AMP_MP_BOTH float m8_inverse(float scale) { return scale == 0 ? 0.0f : 34366164500480.0f / scale; }

AMP_MP_BOTH float decode_m8(M8 x, float step) {
  const float q = float(x.code);
  return q * q * q * step;
}

// 256 times the code as an integer, the cube root of n; a random byte is added, and byte 1 of the
// sum is the code. The root is n y^2 of an integer guess y of |n|^(-1/3), times a parabola fitted
// to
// (|n| y^3)^(-2/3): at most 1.6e-4 short, 1/50 of a code, and never beyond 127 * 256, where the sum
// would overflow. A NaN becomes code 0 of a NaN scale.
AMP_MP_BOTH uint32_t round_m8(float x, float inverse, uint32_t random) {
  const float n = x * inverse;
  const uint32_t magnitude = to_bits(n) & kMagnitude;
  const float third = float(int32_t(magnitude)) * (1.0f / 3);
  const float y = from_bits(0x54638000u - uint32_t(int32_t(third)));
  const float near = n * (y * y), c = from_bits(to_bits(near) & kMagnitude) * y;
  const float root = near * (4.370848f + c * (c * 8.276604f - 9.632071f));
  // A mask, since GCC makes a branch of a choice here without AVX-512, and the loop stays scalar:
  // 13 times the time.
  const uint32_t unless_nan = root != root ? 0u : 0xFFFFFFFFu;
  return (to_bits(root + 12582912.0f) & unless_nan) + random;
}

AMP_MP_BOTH M8 encode_m8(float x, float inverse, uint8_t random) {
  return {int8_t(int16_t(round_m8(x, inverse, random)) >> 8)};
}

}  // namespace amp_mp
