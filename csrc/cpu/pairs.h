#pragma once
// The apply loop for bfloat16 weights with a remainder of a byte or half a byte, two elements at a
// time. What bounds it is the number of instructions: arrays of 16 bits are read and written as
// 32-bit words of two elements, so that nothing is widened or narrowed. Included by apply.h.
#include "cpu/access.h"
#include "cpu/halves.h"

namespace amp_mp::cpu {
namespace {

struct Two {
  float even, odd;
};

// The noises of two random bytes.
struct TwoNoises {
  uint32_t even, odd;
  explicit AMP_MP_BOTH TwoNoises(uint32_t bytes)
      : even(noise_of(bytes & 0xFFu)), odd(noise_of(bytes >> 8)) {}
};

constexpr uint32_t kUpper = 0xFFFF0000u;
AMP_MP_BOTH uint32_t upper_halves(uint32_t even, uint32_t odd) {
  return pick(kUpper, odd, even >> 16);
}

struct GradPairs {
  const Word* __restrict at;
  AMP_MP_BOTH Two get(int i) const { return {from_bits(at[i] << 16), from_bits(at[i] & kUpper)}; }
};

template <Format F>
constexpr bool is_grouped = kFormats[int(F)].is(kGrouped);
template <Format F>
constexpr bool draws_random = kFormats[int(F)].is(kRandom);

// Masters of core/splits.h. `put` is passed the weights' random bytes of a pair.
template <Format F>
struct MasterPairs;

template <>
struct MasterPairs<Format::bfloat16_split24> {
  Word* __restrict high;
  Half* __restrict remainder;

  // The sign of a remainder is extended by a subtraction: x ^ 0x80 is x + 128.
  AMP_MP_BOTH Two get(int i) const {
    const uint32_t two = high[i], low = uint32_t(remainder[i]) ^ 0x8080u;
    return {join(two << 16, low << 8), join(two & kUpper, low)};
  }
  AMP_MP_BOTH void put(int i, Two x, uint32_t) const {
    const uint32_t even = Split24::round(x.even), odd = Split24::round(x.odd);
    high[i] = upper_halves(even + 0x8000u, odd + 0x8000u);
    remainder[i] = uint16_t(pick(0xFFu, even >> 8, odd));
  }

 private:
  static AMP_MP_BOTH float join(uint32_t weight, uint32_t low) {
    return join_bits(weight, pick(kUpper, weight, low & 0xFF00u) - 0x8000u);
  }
};

// Each byte of two remainders is in a half of its own (`widen`).
template <>
struct MasterPairs<Format::bfloat16_split20> {
  Word* __restrict high;
  Half* __restrict remainder;

  AMP_MP_BOTH Two get(int i) const {
    const uint32_t two = high[i], nibbles = remainder[i];
    return {Split20::join(two << 16, nibbles & 15u), Split20::join(two & kUpper, nibbles >> 4)};
  }
  AMP_MP_BOTH void put(int i, Two x, uint32_t random) const {
    const uint32_t even = Split20::round(x.even, random & 0xFFu),
                   odd = Split20::round(x.odd, random >> 8);
    high[i] = upper_halves(even + 0x8000u, odd + 0x8000u);
    remainder[i] = uint16_t(Split20::nibble_of(even) | Split20::nibble_of(odd) << 4);
  }
};

// Bytes to halves and back. In the loop of the update they would make its vectors so long that they
// leave the registers.
AMP_MP_BOTH void widen(const TwoNibbles* __restrict from, Half* __restrict to, int n) {
  for (int i = 0; i < n; ++i) to[i] = from[i].bits;
}
AMP_MP_BOTH void narrow(const Half* __restrict from, TwoNibbles* __restrict to, int n) {
  for (int i = 0; i < n; ++i) to[i] = {uint8_t(from[i])};
}

template <Format F>
struct StatePairs {};  // of a state that the rule does not have

template <>
struct StatePairs<Format::bfloat16_stochastic> {
  Word* __restrict at;
  AMP_MP_BOTH Two get(int i) const { return {from_bits(at[i] << 16), from_bits(at[i] & kUpper)}; }
  AMP_MP_BOTH void put(int i, Two x, TwoNoises noise) const {
    at[i] = upper_halves(round_bfloat16(x.even, noise.even), round_bfloat16(x.odd, noise.odd));
  }
};

template <>
struct StatePairs<Format::ue8m8> {
  Word* __restrict at;
  AMP_MP_BOTH Two get(int i) const {
    return {from_bits(at[i] << 15 & 0x7FFF8000u), from_bits(at[i] >> 1 & 0x7FFF8000u)};
  }
  AMP_MP_BOTH void put(int i, Two x, TwoNoises noise) const {
    at[i] = upper_halves(round_ue8m8(x.even, noise.even), round_ue8m8(x.odd, noise.odd));
  }
};

struct HalvesAccess {
  float* __restrict even, * __restrict odd;
  AMP_MP_BOTH Two get(int i) const { return {even[i], odd[i]}; }
  AMP_MP_BOTH void put(int i, Two x, TwoNoises) const {
    even[i] = x.even;
    odd[i] = x.odd;
  }
};
template <>
struct StatePairs<Format::m8> : HalvesAccess {};
template <>
struct StatePairs<Format::log8> : HalvesAccess {};

template <Format F>
AMP_MP_BOTH StatePairs<F> open_pairs(const Array& array, int64_t at, Halves& halves, int n) {
  if constexpr (F == Format::float32) {
    return {};
  } else if constexpr (is_grouped<F>) {
    decode_halves<GroupOf<typename Elements<F>::Data>>(array, at, halves, n);
    return {{halves.even, halves.odd}};
  } else {
    return {reinterpret_cast<Word*>(at_element<uint16_t>(array.data, at))};
  }
}

template <Format F>
AMP_MP_BOTH void close_pairs(const Array& array, int64_t at, Halves& halves, const uint8_t* random,
                             int n) {
  if constexpr (is_grouped<F>)
    encode_halves<GroupOf<typename Elements<F>::Data>>(halves, array, at, random, n);
}

// `random`, `weight_random`: a byte for each element; the second is for masters that draw.
template <class Rule, Format W, class S0, class S1>
AMP_MP_BOTH void update_all_pairs(const Rule rule, float multiplier, const GradPairs g,
                                  const MasterPairs<W> w, const S0 s0, const S1 s1,
                                  const Half* __restrict random,
                                  const Half* __restrict weight_random, int pairs) {
  for (int i = 0; i < pairs; ++i) {
    const TwoNoises noise(random[i]);
    const Two d = g.get(i);
    Two x = w.get(i), a = s0.get(i);
    if constexpr (state_count<Rule> == 1) {
      rule(d.even * multiplier, x.even, a.even);
      rule(d.odd * multiplier, x.odd, a.odd);
    } else {
      Two b = s1.get(i);
      rule(d.even * multiplier, x.even, a.even, b.even);
      rule(d.odd * multiplier, x.odd, a.odd, b.odd);
      s1.put(i, b, noise);
    }
    s0.put(i, a, noise);
    w.put(i, x, draws_random<W> ? weight_random[i] : 0);
  }
}

// The same, in two loops, as `update` in apply.h.
template <class Rule, Format W, class S0, class S1>
AMP_MP_BOTH void update_pairs(const Rule rule, float multiplier, const GradPairs g,
                              const MasterPairs<W> w, const S0 s0, const S1 s1,
                              const Half* __restrict random, const Half* __restrict weight_random,
                              int pairs) {
  if (is_cautious(rule))
    return update_all_pairs(rule, multiplier, g, w, s0, s1, random, weight_random, pairs);
  update_all_pairs(incautious(rule), multiplier, g, w, s0, s1, random, weight_random, pairs);
}

}  // namespace
}  // namespace amp_mp::cpu
