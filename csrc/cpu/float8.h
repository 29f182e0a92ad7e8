#pragma once
// The inner loops of weights as float8.
#include "core/float8.h"
#include "cpu/tiles.h"

namespace amp_mp::cpu {
namespace {

// Bits of a weight as a signed integer, and those of its infinity.
template <class T>
struct WeightBits;
template <>
struct WeightBits<float> {
  using Bits = int32_t;
  static constexpr Bits kInfinityBits = 0x7F800000;
  static AMP_MP_BOTH float value(Bits bits) { return from_bits(uint32_t(bits)); }
};
template <>
struct WeightBits<float16> {
  using Bits = int16_t;
  static constexpr Bits kInfinityBits = 0x7C00;
  static AMP_MP_BOTH float value(Bits bits) { return decode(float16{uint16_t(bits)}); }
};
template <>
struct WeightBits<bfloat16> {
  using Bits = int16_t;
  static constexpr Bits kInfinityBits = 0x7F80;
  static AMP_MP_BOTH float value(Bits bits) { return decode(bfloat16{uint16_t(bits)}); }
};

template <class Bits>
AMP_MP_BOTH Bits largest_of(const Bits* __restrict x, Bits infinity, int n) {
  Bits largest = 0;
  for (int i = 0; i < n; ++i) {
    const Bits m = finite_magnitude(x[i], infinity);
    largest = m > largest ? m : largest;
  }
  return largest;
}

// The largest finite magnitude of a block's part.
template <class T>
AMP_MP_BOTH float amax_of(const Float8& f, const Float8Part& part) {
  using Bits = typename WeightBits<T>::Bits;
  alignas(64) Bits column[kFloat8Block] = {};  // one for each column: a row adds to all at once
  for (int r = 0; r < part.rows; ++r) {
    const Bits* __restrict x = static_cast<const Bits*>(f.weights) + part.at(f, r);
    for (int i = 0; i < part.columns; ++i) {
      const Bits m = finite_magnitude(x[i], WeightBits<T>::kInfinityBits);
      column[i] = m > column[i] ? m : column[i];
    }
  }
  return WeightBits<T>::value(largest_of(column, WeightBits<T>::kInfinityBits, kFloat8Block));
}

// At most a block's row. Codes become bytes in a loop of their own: in one loop GCC takes 32 at a
// time, for which there are too few registers.
template <class T, class Quotient>
AMP_MP_BOTH void encode_float8(const T* __restrict x, uint8_t* __restrict code, Quotient by,
                               int n) {
  alignas(64) uint32_t wide[kFloat8Block];
  for (int i = 0; i < n; ++i) wide[i] = float8_code(decode(x[i]), by);
  for (int i = 0; i < n; ++i) code[i] = uint8_t(wide[i]);
}
template <class Quotient>
AMP_MP_BOTH void encode_float8(const float16* x, uint8_t* code, Quotient by, int n) {
  alignas(64) float wide[kFloat8Block];
  decode_tile(x, wide, n);
  encode_float8<float>(wide, code, by, n);
}

template <class T, class Quotient>
AMP_MP_BOTH void encode_part(const Float8& f, const Float8Part& part, float scale) {
  const auto by = Quotient::by(scale);
  for (int r = 0; r < part.rows; ++r) {
    const int64_t at = part.at(f, r);
    const T* x = static_cast<const T*>(f.weights) + at;
    if (part.columns == kFloat8Block)
      encode_float8(x, f.codes + at, by, kFloat8Block);
    else
      encode_float8(x, f.codes + at, by, part.columns);
  }
}

template <class T, bool kPower>
AMP_MP_BOTH void float8_blocks(const Float8& f, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; ++block) {
    const Float8Part part = Float8Part::of(f, block);
    if (f.pass == Float8Pass::amax) {
      f.amax[block] = amax_of<T>(f, part);
      continue;
    }
    const bool is_given = f.pass == Float8Pass::codes;
    const float scale = is_given ? get_scale(f, block) : scale_of(f, amax_of<T>(f, part));
    if (!is_given) put_scale(f, block, scale);
    if (is_small_scale(scale))
      encode_part<T, Float8Quotient<kPower, true>>(f, part, scale);
    else
      encode_part<T, Float8Quotient<kPower, false>>(f, part, scale);
  }
}

template <class T>
AMP_MP_BOTH void float8_groups(const Float8& f, int64_t begin, int64_t end) {
  using Bits = typename WeightBits<T>::Bits;
  constexpr int kAtOnce = kFloat8Block / kFloat8Group;
  float scale[kAtOnce];
  for (int64_t first = begin; first < end; first += kAtOnce) {
    const int count = int(end - first < kAtOnce ? end - first : kAtOnce);
    for (int g = 0; g < count; ++g) {  // apart from the codes, so that divisions overlap
      const Bits* bits = static_cast<const Bits*>(f.weights) + (first + g) * kFloat8Group;
      const Bits largest = largest_of(bits, WeightBits<T>::kInfinityBits, kFloat8Group);
      scale[g] = scale_of(f, WeightBits<T>::value(largest));
      put_scale(f, first + g, scale[g]);
    }
    for (int g = 0; g < count; ++g) {
      const int64_t at = (first + g) * kFloat8Group;
      const T* x = static_cast<const T*>(f.weights) + at;
      if (is_small_scale(scale[g]))
        encode_float8(x, f.codes + at, Float8Quotient<true, true>::by(scale[g]), kFloat8Group);
      else
        encode_float8(x, f.codes + at, Float8Quotient<true, false>::by(scale[g]), kFloat8Group);
    }
  }
}

template <class T>
AMP_MP_OWN void float8_of(const Float8& f, int64_t begin, int64_t end) {
  if (f.is_mx)
    float8_groups<T>(f, begin, end);
  else if (f.is_power)
    float8_blocks<T, true>(f, begin, end);
  else
    float8_blocks<T, false>(f, begin, end);
}

AMP_MP_OWN void float8(const Float8& f, int64_t begin, int64_t end) {
  if (f.pass == Float8Pass::scales) {
    for (int64_t block = begin; block < end; ++block)
      put_scale(f, block, scale_of(f, f.amax[block]));
    return;
  }
  switch (f.format) {
    case Format::float16: return float8_of<float16>(f, begin, end);
    case Format::bfloat16: return float8_of<bfloat16>(f, begin, end);
    default: return float8_of<float>(f, begin, end);
  }
}

}  // namespace
}  // namespace amp_mp::cpu
