#pragma once
// Split masters: a float32 master is stored as the low-precision weight and a remainder, in 4 or 3
// bytes instead of 6.
//
// With bfloat16 weights the remainder is signed, and `u` are the master's bits:
//   split32   weight = (u + 0x8000) >> 16, remainder = the low 16 bits of u
//   split24   the same with u first rounded to 24 bits: worst error 1/512 of a bfloat16 ulp
// This is integer arithmetic, and split32 is exact. Ties are rounded away from zero: with ties to
// even, 65,537 floats would round to an even bfloat16, one more than 16 bits can tell apart.
//
// With float16 weights, E being the weight's exponent (at least -14):
//   split32   remainder = (x - weight) in steps of 2^(E - 26): exact from 2^-16 on
//   split24   the same in steps of 2^(E - 18)
// Masters saturate at +-65504. If the weight is NaN, the master is, whatever the remainder.
#include "core/formats.h"

namespace amp_mp {

struct Split32 {
  using Rest = int16_t;

  static AMP_MP_BOTH float join(bfloat16 high, int16_t low) {
    return from_bits((uint32_t(high.bits) << 16) + uint32_t(int32_t(low)));
  }
  // `u` of the comment above.
  static AMP_MP_BOTH uint32_t round(float x) { return canonical_bits(x); }
  static AMP_MP_BOTH void split(float x, bfloat16& high, int16_t& low) {
    const uint32_t u = round(x);
    high = {uint16_t((u + 0x8000u) >> 16)};
    low = int16_t(u);
  }

  static constexpr uint32_t kStepBits = 26;
  static constexpr float kLargest = 32767.0f;
};

struct Split24 {
  using Rest = int8_t;

  static AMP_MP_BOTH float join(bfloat16 high, int8_t low) {
    return from_bits((uint32_t(high.bits) << 16) + (uint32_t(int32_t(low)) << 8));
  }
  static AMP_MP_BOTH uint32_t round(float x) {
    const uint32_t u = canonical_bits(x);
    // The largest finite numbers are truncated: rounded up they would become infinite.
    return u + ((u & 0x7FFFFF80u) == 0x7F7FFF80u ? 0 : 0x80u);
  }
  static AMP_MP_BOTH void split(float x, bfloat16& high, int8_t& low) {
    const uint32_t u = round(x);
    high = {uint16_t((u + 0x8000u) >> 16)};
    low = int8_t(u >> 8);
  }

  static constexpr uint32_t kStepBits = 18;
  static constexpr float kLargest = 127.0f;
};

// The split whose remainder has the given type.
template <class Rest>
struct SplitWith;
template <>
struct SplitWith<int16_t> {
  using type = Split32;
};
template <>
struct SplitWith<int8_t> {
  using type = Split24;
};
template <class Rest>
using SplitOf = typename SplitWith<Rest>::type;

// The bits of 2^max(E, -14), E being the exponent of a decoded float16; 15 for infinity and NaN.
AMP_MP_BOTH uint32_t binade(float weight) {
  const uint32_t e = to_bits(weight) & kInfinity;
  const uint32_t least = e < (113u << 23) ? 113u << 23 : e;
  return least < (142u << 23) ? least : 142u << 23;
}

template <class Split>
AMP_MP_BOTH float join_float16(float weight, typename Split::Rest rest) {
  return weight + float(rest) * from_bits(binade(weight) - (Split::kStepBits << 23));
}

// x has been saturated and rounded to `weight`. Adding 1.5 * 2^23 rounds to an integer.
template <class Split>
AMP_MP_BOTH typename Split::Rest rest_of_float16(float x, float weight) {
  float r = (x - weight) * from_bits(((254u + Split::kStepBits) << 23) - binade(weight));
  r = r < Split::kLargest ? r : Split::kLargest;
  r = r > -Split::kLargest ? r : -Split::kLargest;
  return typename Split::Rest(to_bits(r + 12582912.0f));
}

}  // namespace amp_mp
