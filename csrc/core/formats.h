#pragma once
// Conversions between float32 and the formats of one array. They are integer code, so that every
// compiler and device gives the same bits, NaN included: CUDA's own conversions map each NaN to
// 0x7FFF, _Float16 keeps the payload.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/format_list.h"

namespace amp_mp {

constexpr float kFloat16Max = 65504.0f;
constexpr uint32_t kInfinity = 0x7F800000u;
constexpr uint32_t kMagnitude = 0x7FFFFFFFu;  // every bit of a float but its sign

AMP_MP_BOTH uint32_t to_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

AMP_MP_BOTH float from_bits(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

// `yes ? a : b` without a branch: loops over elements stay scalar with one.
AMP_MP_BOTH float select(bool yes, float a, float b) {
  const uint32_t mask = yes ? 0xFFFFFFFFu : 0u;
  return from_bits((to_bits(a) & mask) | (to_bits(b) & ~mask));
}

// The bits of x, with 0x7FC00000 for every NaN. Encodings start from them, so that dropping or
// rounding low bits never turns a NaN into an infinity or a number.
AMP_MP_BOTH uint32_t canonical_bits(float x) { return x != x ? 0x7FC00000u : to_bits(x); }

// Unlike std::isfinite, no compiler flag can optimise this away.
AMP_MP_BOTH bool is_finite(float x) { return (to_bits(x) & kMagnitude) < kInfinity; }

// Overloads by element type: the float32 value of a stored number; and `encode<T>`, the stored
// number nearest to a value, or, for formats that draw, rounded with 8 random bits.
template <class T>
AMP_MP_BOTH T encode(float x);
template <class T>
AMP_MP_BOTH T encode(float x, uint32_t random);

AMP_MP_BOTH float decode(float x) { return x; }

template <>
AMP_MP_BOTH float encode<float>(float x) {
  return x;
}

AMP_MP_BOTH float decode(bfloat16 x) { return from_bits(uint32_t(x.bits) << 16); }

AMP_MP_BOTH float decode(float16 x) {
#ifdef __CUDA_ARCH__  // the same values in one instruction; only the payload of a NaN may differ
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16, rest = uint32_t(x.bits & 0x7FFFu) << 13;
  // Subnormals by a subtraction of normal floats: a product would lose them where denormal
  // operands are flushed to zero (torch.set_flush_denormal).
  const uint32_t tiny = to_bits(from_bits(rest + (113u << 23)) - from_bits(113u << 23));
  const uint32_t normal = rest + (112u << 23), special = rest | kInfinity;
  return from_bits(sign | (rest >= (31u << 23) ? special : rest < (1u << 23) ? tiny : normal));
#endif
}

// The upper half of the result is x rounded to the nearest bfloat16, ties to even. Infinity stays
// infinity.
AMP_MP_BOTH uint32_t round_bfloat16(float x) {
  const uint32_t u = canonical_bits(x);
  return u + 0x7FFFu + ((u >> 16) & 1u);
}

template <>
AMP_MP_BOTH bfloat16 encode<bfloat16>(float x) {
  return {uint16_t(round_bfloat16(x) >> 16)};
}

// Nearest, ties to even; infinity from 65520 on, as IEEE 754 says. Weights and moments are passed
// through saturate() first; gradients never are, or their overflow would go unseen.
template <>
AMP_MP_BOTH float16 encode<float16>(float x) {
  const uint32_t u = canonical_bits(x), magnitude = u & kMagnitude;
  // Below 2^-14 the sum 0.5 + |x| has an ulp of 2^-24, float16's subnormal step: the addition
  // rounds.
  const uint32_t tiny = to_bits(from_bits(magnitude) + 0.5f) - to_bits(0.5f);
  const uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t half = magnitude < (113u << 23) ? tiny : normal;
  half = magnitude >= (143u << 23) ? 0x7C00u : half;
  half = magnitude > kInfinity ? 0x7E00u : half;
  return {uint16_t(half | ((u >> 16) & 0x8000u))};
}

// Clamps to the largest finite float16, +-65504; a NaN stays a NaN.
AMP_MP_BOTH float saturate(float x) {
  x = x > kFloat16Max ? kFloat16Max : x;
  return x < -kFloat16Max ? -kFloat16Max : x;
}

AMP_MP_BOTH float decode(float16_root x) {
  const float root = decode(x.root);
  return root * root;
}

template <>
AMP_MP_BOTH float16_root encode<float16_root>(float x) {
  return {encode<float16>(saturate(sqrtf(x)))};
}

// Stochastic rounding rounds up with a probability proportional to the bits it drops, so the mean
// over many steps is right; rounding to nearest would return the old value for ever if updates are
// small. There are 8 random bits, and half a unit besides, so that their mean is one half: what is
// below a 512th of the last place is lost. A number that fits exactly does not change, whatever the
// random bits.
AMP_MP_BOTH uint32_t noise_of(uint32_t random) { return random << 8 | 0x80u; }

// NaN is chosen after the addition: choosing first would make the addition wait for the comparison.
AMP_MP_BOTH uint32_t add_to_bits(float x, uint32_t noise) {
  const uint32_t sum = to_bits(x) + noise;
  return x != x ? 0x7FC00000u : sum;
}

AMP_MP_BOTH uint32_t round_bfloat16(float x, uint32_t noise) { return add_to_bits(x, noise); }

template <>
AMP_MP_BOTH bfloat16 encode<bfloat16>(float x, uint32_t random) {
  return {uint16_t(round_bfloat16(x, noise_of(random)) >> 16)};
}

template <>
AMP_MP_BOTH float16 encode<float16>(float x, uint32_t random) {
  const uint32_t u = canonical_bits(saturate(x)), magnitude = u & kMagnitude;
  const float steps = from_bits(magnitude) * 0x1p24f + (float(random) + 0.5f) * 0x1p-8f;
  const uint32_t tiny = uint32_t(magnitude < (113u << 23) ? steps : 0.0f);
  const uint32_t normal = (magnitude - (112u << 23) + (random << 5 | 0x10u)) >> 13;
  uint32_t half = magnitude < (113u << 23) ? tiny : normal;
  half = magnitude > kInfinity ? 0x7E00u : half;
  return {uint16_t(half | ((u >> 16) & 0x8000u))};
}

// A bfloat16 that is never negative: the sign bit becomes an eighth bit of mantissa. It is for
// second moments and rounded stochastically, because at beta2 > .997 rounding to nearest would
// never change the stored value. The unsigned minimum turns every NaN, also a negative one, into
// 0x7FC00000.
AMP_MP_BOTH float decode(ue8m8 x) { return from_bits(uint32_t(x.bits) << 15); }

AMP_MP_BOTH uint32_t round_ue8m8(float x, uint32_t noise) {
  const uint32_t u = to_bits(x), least = u < 0x7FC00000u ? u : 0x7FC00000u;
  return 2 * least + noise;
}

template <>
AMP_MP_BOTH ue8m8 encode<ue8m8>(float x, uint32_t random) {
  return {uint16_t(round_ue8m8(x, noise_of(random)) >> 16)};
}

}  // namespace amp_mp
