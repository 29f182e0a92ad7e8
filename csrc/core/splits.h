#pragma once
// Masters in two parts: the low-precision weight, which the user sees and may write, and a second
// array that adds what the weight's rounding dropped.
//
// Note: The parameter is the truth (docs/design.md)
// Whatever was written into it, joining gives a number within one unit of
// the weight, and the weight itself where it is 0, infinite or NaN. So a split keeps nothing of a
// master that rounds to 0: its remainder cannot be told from that of a weight that was overwritten.
//
//   float32   a whole master, 4 bytes. Where it does not round to the weight, the weight was
//             written by others, and the weight is the master.
//   split32   a remainder of 2 bytes instead, exact
//   split24   of 1 byte
//   split20   of half a byte, for bfloat16 weights
//
// With bfloat16 weights the remainder is signed, and `u` are the master's bits:
//   split32   weight = (u + 0x8000) >> 16, remainder = the low 16 bits of u
//   split24   the same with u first rounded to 24 bits: worst error 1/512 of a bfloat16 ulp
//   split20   the same with u first rounded to 20 bits, at random: to nearest, updates below 1/32
//             of the ulp would be lost
// This is integer arithmetic, and split32 is exact below the numbers that round to infinity. Ties
// are rounded away from zero: with ties to even, 65,537 floats would round to an even bfloat16, one
// more than 16 bits can tell apart.
//
// With float16 weights, E being the weight's exponent (at least -14):
//   split32   remainder = (x - weight) in steps of 2^(E - 26): exact from 2^-16 on
//   split24   the same in steps of 2^(E - 18)
// Masters of splits saturate at +-65504.
#include "core/formats.h"

namespace amp_mp {

// The value of a bfloat16 weight and a remainder, which are added as integers: the sum rounds to
// the weight, for any remainder. Beside 0 it is below 0x8000 or, where a negative remainder takes
// it below zero, near 0x7FFFFFFF, and beside infinity and NaN at least 0x7F7F8000, all without
// their sign: there the weight counts alone. The doubled sum has no sign.
AMP_MP_BOTH float join_bits(uint32_t weight, uint32_t sum) {
  return from_bits(2 * sum - 2 * 0x8000u < 2 * (0x7F7F8000u - 0x8000u) ? sum : weight);
}
AMP_MP_BOTH float join_bits(bfloat16 high, uint32_t remainder) {
  const uint32_t weight = uint32_t(high.bits) << 16;
  return join_bits(weight, weight + remainder);
}

struct Split32 {
  using Master = int16_t;  // of the array beside the weight

  static AMP_MP_BOTH float join(bfloat16 high, int16_t remainder) {
    return join_bits(high, uint32_t(int32_t(remainder)));
  }
  // `u` of the comment above.
  static AMP_MP_BOTH uint32_t round(float x) { return canonical_bits(x); }
  static AMP_MP_BOTH void split(float x, bfloat16& high, int16_t& remainder) {
    const uint32_t u = round(x);
    high = {uint16_t((u + 0x8000u) >> 16)};
    remainder = int16_t(u);
  }

  static constexpr uint32_t kStepBits = 26;
  static constexpr int32_t kLargest = 32767;
};

struct Split24 {
  using Master = int8_t;

  static AMP_MP_BOTH float join(bfloat16 high, int8_t remainder) {
    return join_bits(high, uint32_t(int32_t(remainder)) << 8);
  }
  static AMP_MP_BOTH uint32_t round(float x) { return add_to_bits(x, 0x80u); }
  static AMP_MP_BOTH void split(float x, bfloat16& high, int8_t& remainder) {
    const uint32_t u = round(x);
    high = {uint16_t((u + 0x8000u) >> 16)};
    remainder = int8_t(u >> 8);
  }

  static constexpr uint32_t kStepBits = 18;
  static constexpr int32_t kLargest = 127;
};

struct Split20 {
  using Master = TwoNibbles;

  // nibble: 0 to 15, a signed number of four bits, whose sign a subtraction extends.
  static AMP_MP_BOTH float join(uint32_t weight, uint32_t nibble) {
    return join_bits(weight, weight + ((nibble ^ 8u) << 12) - 0x8000u);
  }
  // `u`, of which the low 12 bits are dropped.
  static AMP_MP_BOTH uint32_t round(float x, uint32_t random) {
    return add_to_bits(x, noise_of(random) >> 4);
  }
  static AMP_MP_BOTH uint32_t nibble_of(uint32_t u) { return u >> 12 & 15u; }
};

// A float32 master beside its weight, which is rounded to nearest even and saturates in float16.
struct WholeMaster {
  using Master = float;

  // `rounded`: the master as it would be stored in the weight.
  template <class T>
  static AMP_MP_BOTH float choose(T weight, T rounded, float master) {
    return rounded.bits == weight.bits ? master : decode(weight);
  }
  static AMP_MP_BOTH float join(bfloat16 weight, float master) {
    return choose(weight, encode<bfloat16>(master), master);
  }
  static AMP_MP_BOTH float join(float16 weight, float master) {
    return choose(weight, encode<float16>(saturate(master)), master);
  }
  static AMP_MP_BOTH void split(float x, bfloat16& weight, float& master) {
    weight = encode<bfloat16>(x);
    master = x;
  }
};

// The split whose remainder has the given type.
template <class Remainder>
struct SplitWith;
template <>
struct SplitWith<int16_t> {
  using type = Split32;
};
template <>
struct SplitWith<int8_t> {
  using type = Split24;
};
template <>
struct SplitWith<TwoNibbles> {
  using type = Split20;
};
template <class Remainder>
using SplitOf = typename SplitWith<Remainder>::type;

// The bits of 2^max(E, -14), E being the exponent of a decoded float16; 15 for infinity and NaN.
AMP_MP_BOTH uint32_t binade(float weight) {
  const uint32_t e = to_bits(weight) & kInfinity;
  const uint32_t least = e < (113u << 23) ? 113u << 23 : e;
  return least < (142u << 23) ? least : 142u << 23;
}

template <class Split>
AMP_MP_BOTH float join_float16(float weight, typename Split::Master remainder) {
  const float sum =
      weight + float(remainder) * from_bits(binade(weight) - (Split::kStepBits << 23));
  return select(weight == 0.0f, weight, sum);
}

// An average beside a float16 weight, which the averaging pass alone writes, from what join_float16
// gives. Without the remainder beside 0, an average that begins there would lose updates below
// 2^-25.
AMP_MP_BOTH float average_of_float16(float joined, int16_t remainder) {
  return select(joined == 0.0f, float(remainder) * 0x1p-40f, joined);
}

// x has been saturated and rounded to `weight`. Adding 1.5 * 2^23 rounds to an integer.
template <class Split>
AMP_MP_BOTH typename Split::Master remainder_of_float16(float x, float weight) {
  float r = (x - weight) * from_bits(((254u + Split::kStepBits) << 23) - binade(weight));
  int32_t steps = int32_t(to_bits(r + 12582912.0f) & kMagnitude) - 0x4B400000;
  steps = steps < Split::kLargest ? steps : Split::kLargest;
  steps = steps > -Split::kLargest ? steps : -Split::kLargest;
  return typename Split::Master(steps);
}

}  // namespace amp_mp
