#pragma once
// numerator / (sqrt(square) * factor + eps) for eight elements, with the bits of sqrtf and of a
// division.
//
// nvcc makes two branches of each sqrtf and each division, for numbers that its fast instructions
// cannot do, and the next element waits behind them. Here are the same fast instructions with one
// test for all eight elements; where it fails, the plain operations are used. They are used
// everywhere in a build with AMP_MP_PLAIN_QUOTIENT=1, which is for a GPU on which
// tests/optim/step/test_quotients.py fails. All of this goes once such a build takes less than 1.03
// times as long on the list "one" of benchmarks/gpu, with memory="exact" and with "micro".
#include "core/rules/base.h"
#include "cuda/pack8.h"

namespace amp_mp::cuda {

#if defined(AMP_MP_PLAIN_QUOTIENT)
__device__ __forceinline__ float quick_root(float x) { return sqrtf(x); }
__device__ __forceinline__ float quick_quotient(float a, float d) { return a / d; }
#elif defined(__CUDA_ARCH__)
// The steps of nvcc's sqrtf and of its division between normal numbers. The FMAs are theirs too:
// each makes up for the rounding of the step before.
__device__ __forceinline__ float quick_root(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  const float g = x * y, h = 0.5f * y;
  return __fmaf_rn(__fmaf_rn(-g, g, x), h, g);
}
__device__ __forceinline__ float quick_quotient(float a, float d) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(d));
  y = __fmaf_rn(y, __fmaf_rn(-d, y, 1.0f), y);
  const float q = a * y;
  return __fmaf_rn(__fmaf_rn(-d, q, a), y, q);
}
#else
// On a CPU: right where a GPU's are, and nowhere else, so that tests notice a missing range check.
__device__ __forceinline__ float quick_root(float x) {
  return x >= 0x1p-100f && x < 0x1p100f ? sqrtf(x) : NAN;
}
__device__ __forceinline__ float quick_quotient(float a, float d) {
  const bool is_quick = fabsf(a) >= 0x1p-66f && fabsf(a) < 0x1p34f && d >= 0x1p-58f && d < 0x1p59f;
  return is_quick ? a / d : NAN;
}
#endif

// Numerators from 2^-66 to 2^34 and squares from 2^-100 to 2^100: every number in between is
// normal. Both ranges are 200 powers of two if the numerator's bits are doubled, which also drops
// its sign: so one comparison does for both.
constexpr uint32_t kLeastNumerator = (127u - 66) << 24, kLeastSquare = (127u - 100) << 23,
                   kQuickSpan = 200u << 23;

// How far the fraction is above the least numerator and square; those below are farthest.
__device__ __forceinline__ uint32_t distance(const Fraction& f) {
  const uint32_t x = to_bits(f.numerator) * 2 - kLeastNumerator,
                 y = to_bits(f.square) - kLeastSquare;
  return x > y ? x : y;
}

__device__ __forceinline__ void divide_all(const RootDivisor& divide,
                                           const Fraction (&fraction)[kPack],
                                           float (&quotient)[kPack]) {
  const bool is_usual =
      divide.factor >= 0x1p-8f && divide.factor < 256.0f && divide.eps >= 0 && divide.eps < 256.0f;
  uint32_t farthest = is_usual ? 0 : ~0u;
  for (int k = 0; k < kPack; ++k) {
    const uint32_t d = distance(fraction[k]);
    farthest = d > farthest ? d : farthest;
    quotient[k] = quick_quotient(fraction[k].numerator,
                                 quick_root(fraction[k].square) * divide.factor + divide.eps);
  }
  if (farthest < kQuickSpan) return;
  for (int k = 0; k < kPack; ++k) {
    const Fraction& f = fraction[k];
    // Rows of an embedding without gradients: zeros, for which division takes its slowest way.
    const bool is_zero =
        is_usual && f.numerator == 0 && (f.square > 0 || (f.square == 0 && divide.eps > 0));
    quotient[k] = is_zero ? f.numerator : divide(f);
  }
}

}  // namespace amp_mp::cuda
