#pragma once
// Between stored formats and float32, a tile at a time. Included once per instruction set, hence
// everything is always_inline: a shared out-of-line copy could hold instructions others cannot run.
#include "plan.h"
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace amp_mp::cpu {

// Elements decoded at a time: large enough to hide the loop's start, small enough that the arrays
// of five tensors stay in L1 (1,024 is 1.6 times slower: the arrays then fall on the same cache
// sets).
constexpr int kTile = 256;

AMP_MP_BOTH void decode_tile(const bfloat16* __restrict from, float* __restrict to, int n) {
  for (int i = 0; i < n; ++i) to[i] = decode(from[i]);
}

AMP_MP_BOTH void decode_tile(const float* __restrict from, float* __restrict to, int n) {
  for (int i = 0; i < n; ++i) to[i] = from[i];
}

// GCC 12 vectorises no _Float16 conversion at any level, and the integer one costs a fourth of the
// speed of a pass over float16 weights: these two are the only intrinsics in the project's loops.
AMP_MP_BOTH void decode_tile(const float16* __restrict from, float* __restrict to, int n) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(from + i))));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
#endif
  for (; i < n; ++i) to[i] = decode(from[i]);
}

AMP_MP_BOTH void encode_tile(const float* __restrict from, bfloat16* __restrict to, int n) {
  for (int i = 0; i < n; ++i) to[i] = encode_bfloat16(from[i]);
}

AMP_MP_BOTH void encode_tile(const float* __restrict from, float* __restrict to, int n) {
  for (int i = 0; i < n; ++i) to[i] = from[i];
}

AMP_MP_BOTH void encode_tile(const float* __restrict from, float16* __restrict to, int n) {
  int i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) {
    __m512 x = _mm512_loadu_ps(from + i);
    // encode_float16 has one NaN; the instruction would keep a payload.
    const __m512 quiet = _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000));
    x = _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
    _mm256_storeu_si256((__m256i*)(to + i), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8) {
    __m256 x = _mm256_loadu_ps(from + i);
    const __m256 quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FC00000));
    x = _mm256_blendv_ps(x, quiet, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  for (; i < n; ++i) to[i] = encode_float16(from[i]);
}

AMP_MP_BOTH void decode_tile(const float16_root* __restrict from, float* __restrict to, int n) {
  decode_tile(&from->root, to, n);
  for (int i = 0; i < n; ++i) to[i] *= to[i];
}

AMP_MP_BOTH void encode_tile(const float* __restrict from, float16_root* __restrict to, int n) {
  alignas(64) float root[kTile];
  for (int i = 0; i < n; ++i) root[i] = saturate(sqrtf(from[i]));
  encode_tile(root, &to->root, n);
}

AMP_MP_BOTH void decode_tile(Span from, int64_t at, float* __restrict to, int n) {
  switch (from.format) {
    case Format::float32: return decode_tile(static_cast<const float*>(from.data) + at, to, n);
    case Format::float16: return decode_tile(static_cast<const float16*>(from.data) + at, to, n);
    case Format::bfloat16: return decode_tile(static_cast<const bfloat16*>(from.data) + at, to, n);
    case Format::float16_root:
      return decode_tile(static_cast<const float16_root*>(from.data) + at, to, n);
  }
}

AMP_MP_BOTH void encode_tile(const float* __restrict from, Span to, int64_t at, int n) {
  switch (to.format) {
    case Format::float32: return encode_tile(from, static_cast<float*>(to.data) + at, n);
    case Format::float16: return encode_tile(from, static_cast<float16*>(to.data) + at, n);
    case Format::bfloat16: return encode_tile(from, static_cast<bfloat16*>(to.data) + at, n);
    case Format::float16_root:
      return encode_tile(from, static_cast<float16_root*>(to.data) + at, n);
  }
}

// As weights and history are stored: float16 saturates. `from` may be `spare`.
AMP_MP_BOTH void store_tile(const float* from, Span to, int64_t at, float* spare, int n) {
  if (saturates(to.format)) {
    for (int i = 0; i < n; ++i) spare[i] = saturate(from[i]);
    from = spare;
  }
  encode_tile(from, to, at, n);
}

}  // namespace amp_mp::cpu
