#pragma once
// Loops that convert a tile of one element type to float32 and back. Included once for each
// instruction set, so every function is always_inline or AMP_MP_OWN: a shared out-of-line copy
// could contain instructions that other processors cannot run.
#include "cpu/float16.h"
#include "plan.h"

// An out-of-line function of this instruction set alone, for long loops with many callers.
#define AMP_MP_OWN [[maybe_unused]] __attribute__((noinline))

namespace amp_mp::cpu {
namespace {

// Elements decoded at a time: large enough to hide the loop's start, small enough that the arrays
// of five tensors stay in L1 (1,024 is 1.6 times slower: the arrays then fall on the same cache
// sets).
constexpr int kTile = 256;

template <class T>
AMP_MP_BOTH void decode_tile(const T* __restrict from, float* __restrict to, int n) {
  for (int i = 0; i < n; ++i) to[i] = decode(from[i]);
}

template <class T>
AMP_MP_BOTH void encode_tile(const float* __restrict from, T* __restrict to, int n) {
  for (int i = 0; i < n; ++i) to[i] = encode<T>(from[i]);
}

// `random` holds one byte for each element.
template <class T>
AMP_MP_BOTH void encode_tile(const float* __restrict from, T* __restrict to,
                             const uint8_t* __restrict random, int n) {
  for (int i = 0; i < n; ++i) to[i] = encode<T>(from[i], random[i]);
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

AMP_MP_BOTH void saturate_tile(const float* __restrict from, float* __restrict to, int n) {
  for (int i = 0; i < n; ++i) to[i] = saturate(from[i]);
}

// Masters of two parts (core/splits.h).
template <class Split>
AMP_MP_BOTH void join_tile(const bfloat16* __restrict high,
                           const typename Split::Master* __restrict master, float* __restrict to,
                           int n) {
  for (int i = 0; i < n; ++i) to[i] = Split::join(high[i], master[i]);
}

template <class Split>
AMP_MP_BOTH void join_tile(const float16* high, const typename Split::Master* __restrict remainder,
                           float* __restrict to, int n) {
  decode_tile(high, to, n);
  for (int i = 0; i < n; ++i) to[i] = join_float16<Split>(to[i], remainder[i]);
}

template <class Split>
AMP_MP_BOTH void split_tile(const float* __restrict from, bfloat16* __restrict high,
                            typename Split::Master* __restrict master, int n) {
  for (int i = 0; i < n; ++i) Split::split(from[i], high[i], master[i]);
}

template <class Split>
AMP_MP_BOTH void split_tile(const float* __restrict from, float16* high,
                            typename Split::Master* __restrict remainder, int n) {
  alignas(64) float x[kTile], weight[kTile];
  round_tile(from, x, high, weight, n);
  for (int i = 0; i < n; ++i) remainder[i] = remainder_of_float16<Split>(x[i], weight[i]);
}

// Two neighbours at a time; n is even.
template <>
AMP_MP_BOTH void join_tile<Split20>(const bfloat16* __restrict high,
                                    const TwoNibbles* __restrict nibbles, float* __restrict to,
                                    int n) {
  for (int i = 0; i < n / 2; ++i) {
    const uint32_t two = nibbles[i].bits;
    to[2 * i] = Split20::join(uint32_t(high[2 * i].bits) << 16, two & 15u);
    to[2 * i + 1] = Split20::join(uint32_t(high[2 * i + 1].bits) << 16, two >> 4);
  }
}

AMP_MP_BOTH void split_tile(const float* __restrict from, bfloat16* __restrict high,
                            TwoNibbles* __restrict nibbles, const uint8_t* __restrict random,
                            int n) {
  for (int i = 0; i < n / 2; ++i) {
    const uint32_t even = Split20::round(from[2 * i], random[2 * i]),
                   odd = Split20::round(from[2 * i + 1], random[2 * i + 1]);
    high[2 * i] = {uint16_t((even + 0x8000u) >> 16)};
    high[2 * i + 1] = {uint16_t((odd + 0x8000u) >> 16)};
    nibbles[i] = {uint8_t(Split20::nibble_of(even) | Split20::nibble_of(odd) << 4)};
  }
}

// A whole master beside a float16 weight.
template <>
AMP_MP_BOTH void join_tile<WholeMaster>(const float16* high, const float* __restrict master,
                                        float* __restrict to, int n) {
  alignas(64) float16 rounded[kTile];
  saturate_tile(master, to, n);
  encode_tile(to, rounded, n);
  decode_tile(high, to, n);
  for (int i = 0; i < n; ++i) to[i] = rounded[i].bits == high[i].bits ? master[i] : to[i];
}

template <>
AMP_MP_BOTH void split_tile<WholeMaster>(const float* __restrict from, float16* high,
                                         float* __restrict master, int n) {
  alignas(64) float x[kTile];
  saturate_tile(from, x, n);
  encode_tile(x, high, n);
  for (int i = 0; i < n; ++i) master[i] = from[i];
}

// Groups with one scale each; n is a multiple of kGroup. A group's constant is first spread to one
// word for each element: with one scalar for each group GCC makes vectors of half the width.
AMP_MP_BOTH void spread(const uint32_t* __restrict constant, uint32_t* __restrict to) {
  for (int g = 0; g < kTile / kGroup; ++g)
    for (int i = 0; i < kGroup; ++i) to[g * kGroup + i] = constant[g];
}

template <class Code>
AMP_MP_BOTH void decode_groups(const Code* __restrict code,
                               const typename GroupOf<Code>::Scale* __restrict scales,
                               float* __restrict to, int n) {
  using Group = GroupOf<Code>;
  alignas(64) uint32_t base[kTile / kGroup] = {}, each[kTile];
  for (int g = 0; g < n / kGroup; ++g) base[g] = Group::base(Group::load(scales[g]));
  spread(base, each);
  for (int i = 0; i < n; ++i) to[i] = Group::decode(code[i], each[i]);
  for (int g = 0; g < n / kGroup; ++g) {
    const uint32_t scale = Group::load(scales[g]);
    if (Group::is_plain(scale)) continue;
    for (int i = 0; i < kGroup; ++i) to[g * kGroup + i] = Group::special(scale);
  }
}

template <class Code>
AMP_MP_BOTH void encode_groups(const float* __restrict from, Code* __restrict code,
                               typename GroupOf<Code>::Scale* __restrict scales,
                               const uint8_t* __restrict random, int n) {
  using Group = GroupOf<Code>;
  alignas(64) uint32_t offset[kTile / kGroup] = {}, each[kTile];
  for (int g = 0; g < n / kGroup; ++g) {
    uint32_t largest = 0;
    for (int i = 0; i < kGroup; ++i) {
      const uint32_t size = to_bits(from[g * kGroup + i]) & Group::kSizeBits;
      largest = largest > size ? largest : size;
    }
    const uint32_t scale = Group::scale(largest);
    scales[g] = Group::store(scale);
    offset[g] = Group::offset(scale);
  }
  spread(offset, each);
  for (int i = 0; i < n; ++i)
    code[i].code = decltype(code->code)(Group::round(from[i], each[i], random[i]) >> 8);
  for (int g = 0; g < n / kGroup; ++g)
    if (!Group::is_plain(Group::load(scales[g]))) memset(code + g * kGroup, 0, kGroup);
}

}  // namespace
}  // namespace amp_mp::cpu
