#pragma once
// The apply loops: a tile of every array is opened as float32, updated, and stored. Included by
// loops.cpp.
//
// Arrays whose conversion is a few integer operations are converted inside the update loop, where
// they never leave the registers: LeanMoment, LeanSquare, Joined. All others go through a tile in
// the cache.
#include "cpu/convert.h"
#include "cpu/measure.h"
#include "cpu/random.h"

namespace amp_mp::cpu {
namespace {

// How the update loop reaches an array; all by value, with restrict: seen through a reference,
// float members could be what the stores change, and the loop would stay scalar.
struct Floats {
  float* __restrict at;
  AMP_MP_BOTH float get(int i) const { return at[i]; }
  AMP_MP_BOTH void put(int i, float x, uint32_t) const { at[i] = x; }
};

struct Nothing {};

template <bool B, class A, class C>
struct Choice {
  using type = A;
};
template <class A, class C>
struct Choice<false, A, C> {
  using type = C;
};
template <bool B, class A, class C>
using choose = typename Choice<B, A, C>::type;

template <class Split>
struct Joined {
  bfloat16* __restrict high;
  typename Split::Rest* __restrict rest;
  AMP_MP_BOTH float get(int i) const { return Split::join(high[i], rest[i]); }
  AMP_MP_BOTH void put(int i, float x, uint32_t) const { Split::split(x, high[i], rest[i]); }
};

struct LeanMoment {
  static constexpr Format kFormat = Format::bfloat16_stochastic;
  bfloat16* __restrict at;
  AMP_MP_BOTH float get(int i) const { return decode(at[i]); }
  AMP_MP_BOTH void put(int i, float x, uint32_t random) const {
    at[i] = encode_bfloat16(x, random);
  }
};

struct LeanSquare {
  static constexpr Format kFormat = Format::ue8m8;
  ue8m8* __restrict at;
  AMP_MP_BOTH float get(int i) const { return decode(at[i]); }
  AMP_MP_BOTH void put(int i, float x, uint32_t random) const { at[i] = encode_ue8m8(x, random); }
};

struct LowGrad {
  const bfloat16* __restrict at;
  AMP_MP_BOTH float get(int i) const { return decode(at[i]); }
};

template <class Rule, bool Random, class G, class W, class S0, class S1, class S2>
AMP_MP_BOTH void update(const Rule rule, float multiplier, const G g, const W w, const S0 s0,
                        const S1 s1, const S2 s2, const uint8_t* __restrict random, int n) {
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = Random ? random[i] : 0;
    float x = w.get(i);
    const float d = g.get(i) * multiplier;
    if constexpr (Rule::kStates == 0) {
      rule(d, x);
    } else if constexpr (Rule::kStates == 1) {
      float a = s0.get(i);
      rule(d, x, a);
      s0.put(i, a, bits);
    } else if constexpr (Rule::kStates == 2) {
      float a = s0.get(i), b = s1.get(i);
      rule(d, x, a, b);
      s0.put(i, a, bits);
      s1.put(i, b, bits);
    } else {
      float a = s0.get(i), b = s1.get(i), c = s2.get(i);
      rule(d, x, a, b, c);
      s0.put(i, a, bits);
      s1.put(i, b, bits);
      s2.put(i, c, bits);
    }
    w.put(i, x, bits);
  }
}

// The elements as float32: where they lie if they are, or else decoded into the tile.
AMP_MP_BOTH float* open_tile(Array from, int64_t at, float* tile, int n) {
  if (from.format == Format::float32) return static_cast<float*>(from.data) + at;
  decode_tile(from, at, tile, n);
  return tile;
}

// An array for the update loop: in place, or its tile.
template <class Access>
AMP_MP_BOTH Access reach(Array array, int64_t at, float* tile, int n) {
  if constexpr (__is_same(Access, Nothing)) {
    return {};
  } else if constexpr (__is_same(Access, Floats)) {
    return {open_tile(array, at, tile, n)};
  } else if constexpr (requires(Access a) { a.rest; }) {
    Access a = {};
    a.high = at_element<bfloat16>(array.data, at);
    a.rest = static_cast<decltype(a.rest)>(array.rest) + at;
    return a;
  } else {
    Access a = {};
    a.at = static_cast<decltype(a.at)>(array.data) + at;
    return a;
  }
}

// The opposite, where something went through a tile.
template <class Access>
AMP_MP_BOTH void leave(const Access& access, Array array, int64_t at, float* tile, float* spare,
                       const uint8_t* random, int n) {
  if constexpr (__is_same(Access, Floats)) {
    if (access.at == tile) store_tile(tile, array, at, spare, random, n);
  }
}

template <class Rule>
AMP_MP_BOTH bool draws(const Slot& slot) {
  bool any = false;
  for (int k = 0; k < Rule::kStates; ++k) any = any || is_stochastic(slot.state[k].format);
  return any;
}

template <class Rule, bool Random, class G, class W, class S0, class S1, class S2>
AMP_MP_BOTH void apply_as(const Slot slot, int64_t begin, int64_t end, const Rule& rule,
                          float multiplier, uint64_t seed) {
  alignas(64) float tile[kTile], master[kTile], state[kMaxStates][kTile];
  const double step = slot.clock->step;
  const bool draw_weights = is_stochastic(slot.master.format);
  Bytes bytes(random_stream(seed, step, slot.tensor_index, false), slot.first);
  Bytes weight_bytes(random_stream(seed, step, slot.tensor_index, true), slot.first);
  for (int64_t i = begin; i < end; i += kTile) {
    const int n = int(end - i < kTile ? end - i : kTile);
    const G g = reach<G>(slot.grad, i, tile, n);
    const W w = reach<W>(slot.master, i, master, n);
    const S0 s0 = reach<S0>(slot.state[0], i, state[0], n);
    const S1 s1 = reach<S1>(slot.state[1], i, state[1], n);
    const S2 s2 = reach<S2>(slot.state[2], i, state[2], n);
    const uint8_t* random = Random ? bytes.of(i) : nullptr;
    update<Rule, Random>(rule, multiplier, g, w, s0, s1, s2, random, n);
    if constexpr (__is_same(W, Floats)) {
      if (slot.weight.data) store_tile(w.at, slot.weight, i, tile, nullptr, n);
    }
    leave(w, slot.master, i, master, tile, draw_weights ? weight_bytes.of(i) : nullptr, n);
    if constexpr (!needs_update_norm<Rule>) {  // its first pass has stored them
      leave(s0, slot.state[0], i, state[0], tile, random, n);
      leave(s1, slot.state[1], i, state[1], tile, random, n);
      leave(s2, slot.state[2], i, state[2], tile, random, n);
    }
  }
}

template <class Rule>
void apply(const Slot& slot, int64_t begin, int64_t end, const Rule& rule, float multiplier,
           uint64_t seed) {
  using One = choose<(Rule::kStates > 0), Floats, Nothing>;
  using Two = choose<(Rule::kStates > 1), Floats, Nothing>;
  using Three = choose<(Rule::kStates > 2), Floats, Nothing>;
  const auto run = [&]<bool Random, class G, class W, class S0, class S1>() {
    apply_as<Rule, Random, G, W, S0, S1, Three>(slot, begin, end, rule, multiplier, seed);
  };
  const auto fused = [&]<bool Random, class W, class S0, class S1>() {
    if (slot.grad.format == Format::bfloat16)
      return run.template operator()<Random, LowGrad, W, S0, S1>();
    run.template operator()<Random, Floats, W, S0, S1>();
  };
  const bool random = draws<Rule>(slot);
  if constexpr (!needs_norms<Rule>) {  // the layerwise rules are rare: general loops only
    using Lean0 =
        choose<(Rule::kStates == 0), Nothing, choose<Rule::kSquares == 0, LeanSquare, LeanMoment>>;
    using Lean1 = choose<(Rule::kStates < 2), Nothing, LeanSquare>;
    const bool lean1 = Rule::kStates < 2 || slot.state[1].format == Format::ue8m8;
    if (slot.master.format == Format::bfloat16_split32 && !random)
      return fused.template operator()<false, Joined<Split32>, One, Two>();
    if constexpr (Rule::kStates > 0) {
      if (slot.master.format == Format::bfloat16_split24 && lean1) {
        if (slot.state[0].format == Lean0::kFormat)
          return fused.template operator()<true, Joined<Split24>, Lean0, Lean1>();
        if (slot.state[0].format == Format::m8)
          return fused.template operator()<true, Joined<Split24>, One, Lean1>();
      }
    }
  }
  if (random) return run.template operator()<true, Floats, Floats, One, Two>();
  run.template operator()<false, Floats, Floats, One, Two>();
}

// The first pass of a rule that needs its update's norm: the moments are advanced, and the update's
// statistics are those of a span. `rule` does not know the norm yet.
template <class Rule>
Statistics moments(const Slot& slot, int64_t begin, int64_t end, const Rule& rule, float multiplier,
                   uint64_t seed) {
  Statistics total = {};
  if constexpr (needs_update_norm<Rule>) {
    alignas(64) float direction[kBlock], tile[kTile], master[kTile], state[2][kTile];
    Bytes bytes(random_stream(seed, slot.clock->step, slot.tensor_index, false), slot.first);
    const bool random = draws<Rule>(slot);
    for (int64_t block = begin; block < end; block += kBlock) {
      const int64_t stop = end < block + kBlock ? end : block + kBlock;
      for (int64_t i = block; i < stop; i += kTile) {
        const int n = int(stop - i < kTile ? stop - i : kTile);
        const float* g = open_tile(slot.grad, i, tile, n);
        const float* w = open_tile(slot.master, i, master, n);
        float *m = open_tile(slot.state[0], i, state[0], n),
              *v = open_tile(slot.state[1], i, state[1], n), *out = direction + (i - block);
        for (int k = 0; k < n; ++k) {
          rule.moments(g[k] * multiplier, w[k], m[k], v[k]);
          out[k] = rule.direction(w[k], m[k], v[k]);
        }
        const uint8_t* drawn = random ? bytes.of(i) : nullptr;
        if (m == state[0]) store_tile(m, slot.state[0], i, tile, drawn, n);
        if (v == state[1]) store_tile(v, slot.state[1], i, tile, drawn, n);
      }
      add_to(total, measure_block(direction, int(stop - block)));
    }
  }
  return total;
}

}  // namespace
}  // namespace amp_mp::cpu
