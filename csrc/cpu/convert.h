#pragma once
// Between stored formats and float32, a tile at a time. Included once per instruction set, hence
// everything is always_inline or AMP_MP_OWN: a shared out-of-line copy could hold instructions
// others cannot run.
#include "plan.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

// A function of this instruction set alone, out of line: what has many callers and long loops.
#define AMP_MP_OWN [[maybe_unused]] __attribute__((noinline))

namespace amp_mp::cpu {
namespace {

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

template <class Encode>
AMP_MP_BOTH void encode_each(int n, const Encode& encode) {
  for (int i = 0; i < n; ++i) encode(i);
}

// Masters in two parts.
template <class Split>
AMP_MP_BOTH void join_tile(const bfloat16* __restrict high,
                           const typename Split::Rest* __restrict rest, float* __restrict to,
                           int n) {
  for (int i = 0; i < n; ++i) to[i] = Split::join(high[i], rest[i]);
}

template <class Split>
AMP_MP_BOTH void join_tile(const float16* high, const typename Split::Rest* __restrict rest,
                           float* __restrict to, int n) {
  decode_tile(high, to, n);
  for (int i = 0; i < n; ++i) to[i] = join_float16<Split>(to[i], rest[i]);
}

template <class Split>
AMP_MP_BOTH void split_tile(const float* __restrict from, bfloat16* __restrict high,
                            typename Split::Rest* __restrict rest, int n) {
  for (int i = 0; i < n; ++i) Split::split(from[i], high[i], rest[i]);
}

template <class Split>
AMP_MP_BOTH void split_tile(const float* __restrict from, float16* high,
                            typename Split::Rest* __restrict rest, int n) {
  alignas(64) float x[kTile], weight[kTile];
  for (int i = 0; i < n; ++i) x[i] = saturate(from[i]);
  encode_tile(x, high, n);
  decode_tile(high, weight, n);
  for (int i = 0; i < n; ++i) rest[i] = rest_of_float16<Split>(x[i], weight[i]);
}

// Groups of 32 with a scale each; n is a multiple of 32. Scales are spread over a float an element
// first: with one scalar a group GCC makes vectors of half the width.
AMP_MP_BOTH void spread(const float* __restrict scale, float* __restrict to, int n) {
  for (int g = 0; g < n / kGroup; ++g)
    for (int i = 0; i < kGroup; ++i) to[g * kGroup + i] = scale[g];
}

AMP_MP_BOTH void decode_m8_tile(const M8* __restrict code, const bfloat16* __restrict scales,
                                float* __restrict to, int n) {
  alignas(64) float step[kTile / kGroup], each[kTile];
  for (int g = 0; g < n / kGroup; ++g) step[g] = m8_step(decode(scales[g]));
  spread(step, each, n);
  for (int i = 0; i < n; ++i) to[i] = decode_m8(code[i], each[i]);
}

AMP_MP_BOTH void encode_m8_tile(const float* __restrict from, M8* __restrict code,
                                bfloat16* __restrict scales, const uint8_t* __restrict random,
                                int n) {
  alignas(64) float inverse[kTile / kGroup], each[kTile];
  uint32_t largest[kTile / kGroup];
  for (int g = 0; g < n / kGroup; ++g) {
    uint32_t most = 0;
    for (int i = 0; i < kGroup; ++i) {
      const uint32_t magnitude = to_bits(from[g * kGroup + i]) & kMagnitude;
      most = most > magnitude ? most : magnitude;
    }
    largest[g] = most;
  }
  for (int g = 0; g < n / kGroup; ++g) {
    scales[g] = m8_scale(largest[g]);
    inverse[g] = m8_inverse(decode(scales[g]));
  }
  spread(inverse, each, n);
  for (int i = 0; i < n; ++i) code[i] = encode_m8(from[i], each[i], random[i]);
}

template <class T>
AMP_MP_BOTH T* at_element(void* data, int64_t at) {
  return static_cast<T*>(data) + at;
}

AMP_MP_OWN void decode_tile(Array from, int64_t at, float* __restrict to, int n) {
  void *data = from.data, *rest = from.rest;
  switch (from.format) {
    case Format::float32: return decode_tile(at_element<float>(data, at), to, n);
    case Format::float16:
    case Format::float16_stochastic: return decode_tile(at_element<float16>(data, at), to, n);
    case Format::bfloat16:
    case Format::bfloat16_stochastic: return decode_tile(at_element<bfloat16>(data, at), to, n);
    case Format::float16_root: return decode_tile(at_element<float16_root>(data, at), to, n);
    case Format::ue8m8: {
      const ue8m8* x = at_element<ue8m8>(data, at);
      return encode_each(n, [&](int i) { to[i] = decode(x[i]); });
    }
    case Format::m8:
      return decode_m8_tile(at_element<M8>(data, at), at_element<bfloat16>(rest, at / kGroup), to,
                            n);
    case Format::bfloat16_split32:
      return join_tile<Split32>(at_element<bfloat16>(data, at), at_element<int16_t>(rest, at), to,
                                n);
    case Format::bfloat16_split24:
      return join_tile<Split24>(at_element<bfloat16>(data, at), at_element<int8_t>(rest, at), to,
                                n);
    case Format::float16_split32:
      return join_tile<Split32>(at_element<float16>(data, at), at_element<int16_t>(rest, at), to,
                                n);
    case Format::float16_split24:
      return join_tile<Split24>(at_element<float16>(data, at), at_element<int8_t>(rest, at), to, n);
  }
}

// `random` holds a byte an element for the formats that draw, and may be null for the others.
AMP_MP_OWN void encode_tile(const float* __restrict from, Array to, int64_t at,
                            const uint8_t* __restrict random, int n) {
  void *data = to.data, *rest = to.rest;
  switch (to.format) {
    case Format::float32: return encode_tile(from, at_element<float>(data, at), n);
    case Format::float16: return encode_tile(from, at_element<float16>(data, at), n);
    case Format::bfloat16: return encode_tile(from, at_element<bfloat16>(data, at), n);
    case Format::float16_root: return encode_tile(from, at_element<float16_root>(data, at), n);
    case Format::float16_stochastic: {
      float16* __restrict x = at_element<float16>(data, at);
      return encode_each(n, [&](int i) { x[i] = encode_float16(from[i], random[i]); });
    }
    case Format::bfloat16_stochastic: {
      bfloat16* __restrict x = at_element<bfloat16>(data, at);
      return encode_each(n, [&](int i) { x[i] = encode_bfloat16(from[i], random[i]); });
    }
    case Format::ue8m8: {
      ue8m8* __restrict x = at_element<ue8m8>(data, at);
      return encode_each(n, [&](int i) { x[i] = encode_ue8m8(from[i], random[i]); });
    }
    case Format::m8:
      return encode_m8_tile(from, at_element<M8>(data, at), at_element<bfloat16>(rest, at / kGroup),
                            random, n);
    case Format::bfloat16_split32:
      return split_tile<Split32>(from, at_element<bfloat16>(data, at),
                                 at_element<int16_t>(rest, at), n);
    case Format::bfloat16_split24:
      return split_tile<Split24>(from, at_element<bfloat16>(data, at), at_element<int8_t>(rest, at),
                                 n);
    case Format::float16_split32:
      return split_tile<Split32>(from, at_element<float16>(data, at), at_element<int16_t>(rest, at),
                                 n);
    case Format::float16_split24:
      return split_tile<Split24>(from, at_element<float16>(data, at), at_element<int8_t>(rest, at),
                                 n);
  }
}

// As weights and history are stored: float16 saturates. `from` may be `spare`.
AMP_MP_OWN void store_tile(const float* from, Array to, int64_t at, float* spare,
                           const uint8_t* random, int n) {
  if (saturates(to.format)) {
    for (int i = 0; i < n; ++i) spare[i] = saturate(from[i]);
    from = spare;
  }
  encode_tile(from, to, at, random, n);
}

}  // namespace
}  // namespace amp_mp::cpu
