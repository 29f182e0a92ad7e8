#pragma once
// Momentum in one byte, in equal steps: groups of 32 neighbours share m8's scale S, and a code q of
// [-127, 127] stands for S * (q / 127).
//
// It is for the momentum that Muon makes orthogonal. Orthogonal matrices have all directions in
// equal measure, so what counts is the error of the whole group: m8's is 1.6 times as large, for
// its fine steps lie near 0. Adam divides by the root of each element's second moment, and needs
// these.
#include "core/m8.h"

namespace amp_mp {

// core/groups.h says what the members are. Scales are M8Group's.
struct I8Group : M8Group {
  using Code = I8;

  static constexpr float kStep = 1.0f / 127;

  static AMP_MP_BOTH uint32_t base(uint32_t scale) { return scale; }
  static AMP_MP_BOTH float decode(I8 x, uint32_t base) {
    return decode_top(uint32_t(uint8_t(x.code)) << 24, base);
  }
  // In this order 127 stands for S itself, and no product overflows.
  static AMP_MP_BOTH float decode_top(uint32_t word, uint32_t base) {
    return float(int32_t(word) >> 24) * kStep * from_bits(base);
  }

  // 127 * 256 / S, by which a number becomes 256 times its code. The error is below 1/2, so that a
  // decoded number gets its own code back, for any random byte.
  static AMP_MP_BOTH uint32_t offset(uint32_t scale) {
    return to_bits(from_bits(kLargestRoot) / from_bits(scale));
  }
  static AMP_MP_BOTH uint32_t round(float x, uint32_t offset, uint32_t random) {
    const float root = x * from_bits(offset);
    return to_bits(root + 12582912.0f) + random;  // adding 1.5 * 2^23 rounds to an integer
  }
};

}  // namespace amp_mp
