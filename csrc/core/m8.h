#pragma once
// First moments in one byte: groups of 32 neighbours share a bfloat16 scale, not below their
// largest magnitude, and a code q of [-127, 127] means scale * (q / 127)^3.
//
// The cube covers 6 decades. A lower power would make the smallest code far larger than the
// smallest moments of a mixed group; the second moment, exact to 1/512, would still be as small as
// they are, and their quotient, Adam's update, tens of times too large. Stochastic rounding lets a
// moment that gets no more gradients decay; rounding to nearest would keep its code for ever.
#include "core/formats.h"

namespace amp_mp {

constexpr int kGroup = 32;

// A group's scale, rounded up so that no code exceeds 127. A group below 2^-80 becomes zero, so
// that the inverse is finite.
AMP_MP_BOTH bfloat16 m8_scale(uint32_t largest_magnitude) {
  const uint32_t u = largest_magnitude < 0x7FC00000u ? largest_magnitude : 0x7FC00000u;
  return {uint16_t(u < (47u << 23) ? 0 : (u + 0xFFFFu) >> 16)};
}

// The factors of a group's codes: to decode, scale / 127^3, rounded down so that code 127 is not
// above the scale; to encode, (127 * 256)^3 / scale.
AMP_MP_BOTH float m8_step(float scale) { return scale * 4.8818978e-07f; }
AMP_MP_BOTH float m8_inverse(float scale) { return scale == 0 ? 0.0f : 34366164500480.0f / scale; }

AMP_MP_BOTH float decode_m8(M8 x, float step) {
  const float q = float(x.code);
  return q * q * q * step;
}

// 256 times the code, plus a random byte: byte 1 of the result is the code. The code is the cube
// root of n = x * inverse, computed as n y^2, where y is a guess of |n|^(-1/3) by integer
// arithmetic, times a parabola fitted to (|n| y^3)^(-2/3). It is at most 1.6e-4 too small, 1/50 of
// a code, and never above 127 * 256, where the sum would overflow. A NaN becomes code 0, and its
// group's scale NaN.
AMP_MP_BOTH uint32_t round_m8(float x, float inverse, uint32_t random) {
  const float n = x * inverse;
  const uint32_t magnitude = to_bits(n) & kMagnitude;
  const float third = float(int32_t(magnitude)) * (1.0f / 3);
  const float y = from_bits(0x54638000u - uint32_t(int32_t(third)));
  const float near = n * (y * y), c = from_bits(to_bits(near) & kMagnitude) * y;
  const float root = near * (4.370848f + c * (c * 8.276604f - 9.632071f));
  // A mask instead of a condition: without AVX-512 GCC would make a branch of it, and the loop
  // would stay scalar and take 13 times as long.
  const uint32_t unless_nan = root != root ? 0u : 0xFFFFFFFFu;
  return (to_bits(root + 12582912.0f) & unless_nan) + random;
}

AMP_MP_BOTH M8 encode_m8(float x, float inverse, uint8_t random) {
  return {int8_t(int16_t(round_m8(x, inverse, random)) >> 8)};
}

}  // namespace amp_mp
