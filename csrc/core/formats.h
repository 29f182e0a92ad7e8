#pragma once
// How a number is stored. Conversions are integer code, so that every compiler and device gives the
// same bits, NaN included: CUDA's own conversions map each NaN to 0x7FFF, _Float16 keeps a payload.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/macros.h"

namespace amp_mp {

// What an array of numbers is stored as. float16_root holds the square root of a number that is not
// negative: what is below float16's range when squared, Adam's second moment, is within it when
// not. The formats from split32 on, and m8, are two arrays (plan.h, Array): core/splits.h,
// core/m8.h.
enum class Format : uint8_t {
  float32,
  float16,
  bfloat16,
  float16_root,
  float16_stochastic,
  bfloat16_stochastic,
  ue8m8,
  m8,
  bfloat16_split32,
  bfloat16_split24,
  float16_split32,
  float16_split24,
};

// In the order of the enum: what Python calls them.
constexpr const char* kFormatNames[] = {
    "float32",
    "float16",
    "bfloat16",
    "float16_root",
    "float16_stochastic",
    "bfloat16_stochastic",
    "ue8m8",
    "m8",
    "bfloat16_split32",
    "bfloat16_split24",
    "float16_split32",
    "float16_split24",
};
constexpr int kFormats = sizeof kFormatNames / sizeof *kFormatNames;

struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};
struct float16_root {
  float16 root;
};
struct ue8m8 {
  uint16_t bits;
};

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

// The bits of x, any NaN as 0x7FC00000: what an encoding starts from, so that dropping or rounding
// low bits can never turn a NaN into an infinity or a number.
AMP_MP_BOTH uint32_t canonical_bits(float x) { return x != x ? 0x7FC00000u : to_bits(x); }

// Not std::isfinite: this survives any compiler flag and works on the integer unit.
AMP_MP_BOTH bool is_finite(float x) { return (to_bits(x) & kMagnitude) < kInfinity; }

AMP_MP_BOTH float decode(float x) { return x; }

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

// Nearest, ties to even, in the upper half. Infinity stays infinity.
AMP_MP_BOTH uint32_t round_bfloat16(float x) {
  const uint32_t u = canonical_bits(x);
  return u + 0x7FFFu + ((u >> 16) & 1u);
}

AMP_MP_BOTH bfloat16 encode_bfloat16(float x) { return {uint16_t(round_bfloat16(x) >> 16)}; }

// Nearest, ties to even. From 65520 on it is infinity, as IEEE 754 says: use saturate() first for
// weights and history, never for gradients, whose overflow has to stay visible.
AMP_MP_BOTH float16 encode_float16(float x) {
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

AMP_MP_BOTH float16_root encode_float16_root(float x) {
  return {encode_float16(saturate(sqrtf(x)))};
}

// Stochastic rounding: up with the probability of what is dropped, so that the mean over steps is
// right where the nearest value would be the old one for ever. 8 random bits with half a bit more
// are as good as 16 here. What fits exactly stays as it is, whatever the bits.
AMP_MP_BOTH uint32_t noise_of(uint32_t random) { return random << 8 | 0x80u; }

AMP_MP_BOTH uint32_t round_bfloat16(float x, uint32_t noise) { return canonical_bits(x) + noise; }

AMP_MP_BOTH bfloat16 encode_bfloat16(float x, uint32_t random) {
  return {uint16_t(round_bfloat16(x, noise_of(random)) >> 16)};
}

AMP_MP_BOTH float16 encode_float16(float x, uint32_t random) {
  const uint32_t u = canonical_bits(saturate(x)), magnitude = u & kMagnitude;
  const float steps = from_bits(magnitude) * 0x1p24f + (float(random) + 0.5f) * 0x1p-8f;
  const uint32_t tiny = uint32_t(magnitude < (113u << 23) ? steps : 0.0f);
  const uint32_t normal = (magnitude - (112u << 23) + (random << 5 | 0x10u)) >> 13;
  uint32_t half = magnitude < (113u << 23) ? tiny : normal;
  half = magnitude > kInfinity ? 0x7E00u : half;
  return {uint16_t(half | ((u >> 16) & 0x8000u))};
}

// A bfloat16 that is never negative: the dead sign bit is an eighth bit of mantissa. For second
// moments, rounded stochastically: at beta2 > .997 the nearest value sticks. The unsigned minimum
// makes the NaNs one, the negative one too.
AMP_MP_BOTH float decode(ue8m8 x) { return from_bits(uint32_t(x.bits) << 15); }

AMP_MP_BOTH uint32_t round_ue8m8(float x, uint32_t noise) {
  const uint32_t u = to_bits(x), least = u < 0x7FC00000u ? u : 0x7FC00000u;
  return 2 * least + noise;
}

AMP_MP_BOTH ue8m8 encode_ue8m8(float x, uint32_t random) {
  return {uint16_t(round_ue8m8(x, noise_of(random)) >> 16)};
}

// Whether stores of weights and history in the format are to be saturated.
AMP_MP_BOTH bool saturates(Format f) { return f == Format::float16; }

// Whether encoding draws random bits.
AMP_MP_BOTH bool is_stochastic(Format f) {
  return f >= Format::float16_stochastic && f <= Format::m8;
}

AMP_MP_BOTH bool is_split(Format f) { return f >= Format::bfloat16_split32; }

// Bytes an element takes, and those of it in a split format's second array.
AMP_MP_BOTH int width_of(Format f) { return f == Format::float32 ? 4 : f == Format::m8 ? 1 : 2; }

AMP_MP_BOTH int rest_width_of(Format f) {
  return f == Format::bfloat16_split32 || f == Format::float16_split32   ? 2
         : f == Format::bfloat16_split24 || f == Format::float16_split24 ? 1
                                                                         : 0;
}

}  // namespace amp_mp
