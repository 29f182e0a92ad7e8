#pragma once
// First moments in one byte: groups of 32 neighbours share a bfloat16 scale, not below their
// largest magnitude, and a code q of [-127, 127] stands for about scale * (q / 127)^3. The cube is
// computed on the bits of floats, which are nearly the logarithm of the number: three times as far
// below the scale's bits as q is below 127's.
//
//   bits(|x|) = bits(scale) - 3 * (bits(127.0f) - bits(float(|q|)))
//
// This is a straight line between two codes, but for two intervals in each octave that bend, so
// stochastic rounding has the right mean. Code 0 is 0.
//
// The cube covers 6 decades. A lower power would make the smallest code far larger than the
// smallest moments of a mixed group; the second moment, exact to 1/512, would still be as small as
// they are, and their quotient, Adam's update, tens of times too large. Stochastic rounding lets a
// moment that gets no more gradients decay; rounding to nearest would keep its code for ever.
#include "core/formats.h"

namespace amp_mp {

// core/groups.h says what the members are.
struct M8Group {
  using Code = M8;
  using Scale = bfloat16;

  static constexpr uint32_t kLargestCode = 0x42FE0000u;  // the bits of 127.0f
  static constexpr uint32_t kLargestRoot = 0x46FE0000u;  // the bits of 127 * 256
  // The smallest scale that is stored, 2^-76. Far below it, 0 could round to another code.
  static constexpr uint32_t kLeast = 51u << 23;

  static AMP_MP_BOTH uint32_t load(bfloat16 scale) { return uint32_t(scale.bits) << 16; }
  static AMP_MP_BOTH bfloat16 store(uint32_t scale) { return {uint16_t(scale >> 16)}; }
  static constexpr uint32_t kSizeBits = kMagnitude;

  // Rounded up to a bfloat16, so that no code exceeds 127. An infinity or a NaN makes its group
  // NaN.
  static AMP_MP_BOTH uint32_t scale(uint32_t largest) {
    const uint32_t up = (largest + 0xFFFFu) & 0xFFFF0000u, least = up > kLeast ? up : kLeast;
    return largest <= 0x7F7F0000u ? least : 0x7FC00000u;
  }
  static AMP_MP_BOTH bool is_plain(uint32_t scale) { return scale < kInfinity; }
  static AMP_MP_BOTH float special(uint32_t scale) { return from_bits(scale); }

  // The sign comes out right, because 3 * 2^31 is 2^31 modulo 2^32.
  static AMP_MP_BOTH uint32_t base(uint32_t scale) { return scale - 3 * kLargestCode; }
  static AMP_MP_BOTH float decode(M8 x, uint32_t base) {
    return decode_top(uint32_t(uint8_t(x.code)) << 24, base);
  }
  static AMP_MP_BOTH float decode_top(uint32_t word, uint32_t base) {
    const uint32_t code = to_bits(float(int32_t(word) >> 24)), bits = 3 * code + base;
    // A mask instead of a condition: GCC would make a branch of it, and the loop would stay scalar.
    const uint32_t unless_zero = code == 0 ? 0u : 0xFFFFFFFFu;
    return from_bits(bits & unless_zero);
  }

  // 256 times the code is the float whose bits are a third of the number's bits and the offset. Its
  // error is less than 1/2, so that a decoded number gets its own code back, for any random byte.
  static AMP_MP_BOTH uint32_t offset(uint32_t scale) {
    return to_bits(float(int32_t(kLargestRoot)) - float(int32_t(scale)) * (1.0f / 3));
  }
  static AMP_MP_BOTH uint32_t round(float x, uint32_t offset, uint32_t random) {
    const uint32_t u = to_bits(x);
    const float third = float(int32_t(u & kMagnitude)) * (1.0f / 3) + from_bits(offset);
    const float root = from_bits(uint32_t(int32_t(third)) | (u & ~kMagnitude));
    return to_bits(root + 12582912.0f) + random;  // adding 1.5 * 2^23 rounds to an integer
  }
};

}  // namespace amp_mp
