#pragma once
// Tiles of float16 to float32 and back. GCC 12 vectorises no float16 conversion at any level, and
// the integer one costs a fourth of the speed of a pass over float16 weights: these and random.h's
// product are the only intrinsics. Included once for each instruction set.
#include "core/formats.h"
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace amp_mp::cpu {
namespace {

// kHalfLanes numbers at a time, as encode<float16>, decode and saturate do it. encode has one NaN;
// the instruction would keep a payload, so `narrow` replaces NaNs first.
#if defined(__AVX512F__)
constexpr int kHalfLanes = 16;
typedef __m512 Vector;
AMP_MP_BOTH Vector load(const float* from) { return _mm512_loadu_ps(from); }
AMP_MP_BOTH void store(Vector x, float* to) { _mm512_storeu_ps(to, x); }
AMP_MP_BOTH Vector widen(const float16* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
AMP_MP_BOTH void narrow(Vector x, float16* to) {
  const Vector quiet = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000));
  x = _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
AMP_MP_BOTH Vector clamp(Vector x) {  // the second argument is the result if one is a NaN
  x = _mm512_min_ps(_mm512_set1_ps(kFloat16Max), x);
  return _mm512_max_ps(_mm512_set1_ps(-kFloat16Max), x);
}
#elif defined(__F16C__)
constexpr int kHalfLanes = 8;
typedef __m256 Vector;
AMP_MP_BOTH Vector load(const float* from) { return _mm256_loadu_ps(from); }
AMP_MP_BOTH void store(Vector x, float* to) { _mm256_storeu_ps(to, x); }
AMP_MP_BOTH Vector widen(const float16* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
AMP_MP_BOTH void narrow(Vector x, float16* to) {
  const Vector quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
  x = _mm256_blendv_ps(x, quiet, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
AMP_MP_BOTH Vector clamp(Vector x) {
  x = _mm256_min_ps(_mm256_set1_ps(kFloat16Max), x);
  return _mm256_max_ps(_mm256_set1_ps(-kFloat16Max), x);
}
#elif defined(__aarch64__)
// FZ16, which torch.set_flush_denormal sets, does not reach these conversions.
constexpr int kHalfLanes = 4;
typedef float32x4_t Vector;
AMP_MP_BOTH Vector load(const float* from) { return vld1q_f32(from); }
AMP_MP_BOTH void store(Vector x, float* to) { vst1q_f32(to, x); }
AMP_MP_BOTH Vector widen(const float16* from) {
  return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits)));
}
AMP_MP_BOTH void narrow(Vector x, float16* to) {
  const Vector quiet = vreinterpretq_f32_u32(vdupq_n_u32(0x7FC00000));
  x = vbslq_f32(vceqq_f32(x, x), x, quiet);
  vst1_u16(&to->bits, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}
AMP_MP_BOTH Vector clamp(Vector x) {  // not vminq_f32, which changes a signalling NaN
  const Vector largest = vdupq_n_f32(kFloat16Max), least = vdupq_n_f32(-kFloat16Max);
  x = vbslq_f32(vcgtq_f32(x, largest), largest, x);
  return vbslq_f32(vcltq_f32(x, least), least, x);
}
#else
constexpr int kHalfLanes = 1;
struct Vector {
  float x;
};
AMP_MP_BOTH Vector load(const float* from) { return {*from}; }
AMP_MP_BOTH void store(Vector v, float* to) { *to = v.x; }
AMP_MP_BOTH Vector widen(const float16* from) { return {decode(*from)}; }
AMP_MP_BOTH void narrow(Vector v, float16* to) { *to = encode<float16>(v.x); }
AMP_MP_BOTH Vector clamp(Vector v) { return {saturate(v.x)}; }
#endif

AMP_MP_BOTH void decode_tile(const float16* __restrict from, float* __restrict to, int n) {
  int i = 0;
  for (; i + kHalfLanes <= n; i += kHalfLanes) store(widen(from + i), to + i);
  for (; i < n; ++i) to[i] = decode(from[i]);
}

AMP_MP_BOTH void encode_tile(const float* __restrict from, float16* __restrict to, int n) {
  int i = 0;
  for (; i + kHalfLanes <= n; i += kHalfLanes) narrow(load(from + i), to + i);
  for (; i < n; ++i) to[i] = encode<float16>(from[i]);
}

// Stores weights, which saturate, and returns what was encoded and what it became.
AMP_MP_BOTH void round_tile(const float* __restrict from, float* __restrict saturated,
                            float16* __restrict to, float* __restrict rounded, int n) {
  int i = 0;
  for (; i + kHalfLanes <= n; i += kHalfLanes) {
    const Vector x = clamp(load(from + i));
    store(x, saturated + i);
    narrow(x, to + i);
    store(widen(to + i), rounded + i);
  }
  for (; i < n; ++i) {
    saturated[i] = saturate(from[i]);
    to[i] = encode<float16>(saturated[i]);
    rounded[i] = decode(to[i]);
  }
}

}  // namespace
}  // namespace amp_mp::cpu
