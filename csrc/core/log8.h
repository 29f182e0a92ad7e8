#pragma once
// Sums of squares in one byte: groups of 32 neighbours share a scale S = 2^(e - 127), stored as the
// byte e, and above 32/31 of their largest number. A code is a logarithm in straight pieces:
//
//   codes 160 to 255   the 6 powers of two below S, 16 steps each
//   codes 0 to 159     the 20 below those, 8 steps each; code 0 is 2^-26 S
//
// Code 0 stands for everything below it, 0 too. If it stood for zero, Adam's update m / sqrt(v)
// would be hundreds of times too large where neighbours differ much; with this floor it is smaller.
//
// The scale is a power of two, so that the steps stay where they are while it changes: storing what
// was loaded changes nothing. Rounding is stochastic: to nearest, a sum of squares that decays by a
// thousandth a step would never change.
#include "core/formats.h"

namespace amp_mp {

// core/groups.h says what the members are. Numbers must not be negative, nor -0: their group would
// become NaN.
struct Log8Group {
  using Code = Log8;
  using Scale = uint8_t;

  // The smallest scale: below it, the smallest numbers would not be normal floats. 0 is a group
  // that no step has written yet, all zero; 1 is a group with an infinity, a NaN or a number
  // of 3.3e38 or more, all NaN.
  static constexpr uint32_t kLeast = 30, kBad = 1;

  static AMP_MP_BOTH uint32_t load(uint8_t scale) { return scale; }
  static AMP_MP_BOTH uint8_t store(uint32_t scale) { return uint8_t(scale); }
  static constexpr uint32_t kSizeBits = 0xFFFFFFFFu;

  static AMP_MP_BOTH uint32_t scale(uint32_t largest) {
    const uint32_t e = (((largest >> 19) + 1) >> 4) + 1, least = e > kLeast ? e : kLeast;
    return least <= 255 ? least : kBad;
  }
  static AMP_MP_BOTH bool is_plain(uint32_t scale) { return scale >= kLeast; }
  static AMP_MP_BOTH float special(uint32_t scale) {
    return from_bits(scale == kBad ? 0x7FC00000u : 0);
  }

  // The bits of S less those of 1.
  static AMP_MP_BOTH uint32_t base(uint32_t scale) { return (scale - 127u) << 23; }
  static AMP_MP_BOTH float decode(Log8 x, uint32_t base) {
    return decode_top(uint32_t(x.code) << 24, base);
  }
  static AMP_MP_BOTH float decode_top(uint32_t word, uint32_t base) {
    const uint32_t c = word >> 24, coarse = (c << 20) + 0x32800000u, fine = (c << 19) + 0x37800000u;
    return from_bits((coarse < fine ? coarse : fine) + base);
  }

  // Where code 0 would begin if all powers of two had 16 steps, and where it begins with 8; both
  // less half a 256th of a code, so that the shifts round to nearest. Cutting off instead would
  // make each store 2e-4 too small on average, and at beta2 = .999 that adds up to 20 %.
  static constexpr uint32_t kFine = 0x3C800000u - (1u << 10) - (160u << 19);
  static constexpr uint32_t kCoarse = 0x32800000u - (1u << 11);
  static AMP_MP_BOTH uint32_t offset(uint32_t scale) { return base(scale) + kFine; }
  static AMP_MP_BOTH uint32_t round(float x, uint32_t offset, uint32_t random) {
    const uint32_t u = to_bits(x) - offset;
    const int32_t fine = int32_t(u) >> 11, coarse = int32_t(u + (kFine - kCoarse)) >> 12;
    const int32_t code = fine > coarse ? fine : coarse;
    return uint32_t(code > 0 ? code : 0) + random;
  }
};

}  // namespace amp_mp
