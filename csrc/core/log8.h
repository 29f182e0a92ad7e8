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

  // Scales that are stored; below the least, the smallest numbers would not be normal floats. 0 is
  // a group that no step has written yet, all zero; 255 one with an infinity or a NaN, all NaN.
  static constexpr uint32_t kLeast = 30, kMost = 254, kBad = 255;

  static AMP_MP_BOTH uint32_t load(uint8_t scale) { return scale; }
  static AMP_MP_BOTH uint8_t store(uint32_t scale) { return uint8_t(scale); }
  static AMP_MP_BOTH uint32_t size(float x) { return to_bits(x); }

  static AMP_MP_BOTH uint32_t scale(uint32_t largest) {
    const uint32_t e = ((largest + (1u << 19)) >> 23) + 1;
    const uint32_t least = e > kLeast ? e : kLeast, most = least < kMost ? least : kMost;
    return largest < kInfinity ? most : kBad;
  }
  static AMP_MP_BOTH bool is_plain(uint32_t scale) { return scale - 1 < kMost; }
  static AMP_MP_BOTH float special(uint32_t scale) {
    return from_bits(scale == kBad ? 0x7FC00000u : 0);
  }

  // The bits of S less those of 1.
  static AMP_MP_BOTH uint32_t base(uint32_t scale) { return (scale - 127u) << 23; }
  static AMP_MP_BOTH float decode(Log8 x, uint32_t base) {
    const uint32_t c = x.code, coarse = (c << 20) + 0x32800000u, fine = (c << 19) + 0x37800000u;
    return from_bits((coarse < fine ? coarse : fine) + base);
  }

  // 256 times the code, to the nearest. Cut off instead, a sum of squares that decays by a
  // thousandth a step, 3 / 256 of a code, would end a quarter too small. Numbers above 31/32 of the
  // largest scale, 1.6e38, become that.
  static AMP_MP_BOTH uint32_t offset(uint32_t scale) { return base(scale); }
  static AMP_MP_BOTH uint32_t round(float x, uint32_t offset, uint32_t random) {
    const int32_t top = 0x3F780000, all = int32_t(to_bits(x) - offset), u = all < top ? all : top;
    const int32_t fine = ((u - (0x3C800000 - (1 << 10))) >> 11) + (160 << 8);
    const int32_t coarse = (u - (0x32800000 - (1 << 11))) >> 12;
    const int32_t code = fine > coarse ? fine : coarse;
    return uint32_t(code > 0 ? code : 0) + random;
  }
};

}  // namespace amp_mp
