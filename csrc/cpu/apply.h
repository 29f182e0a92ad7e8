#pragma once
// The apply loop of a rule: opens a tile of every array, updates it, stores it. Included by
// apply.cpp.
#include "cpu/changes.h"
#include "cpu/pairs.h"

namespace amp_mp::cpu {
namespace {

// The update of n elements. `Random`: some state is stochastic, `random` has one byte for each
// element.
template <class Rule, bool Random, class G, class W, class S0, class S1, class S2>
AMP_MP_BOTH void update_all(const Rule rule, float multiplier, const G g, const W w, const S0 s0,
                            const S1 s1, const S2 s2, const uint8_t* __restrict random, int n) {
  for (int i = 0; i < n; ++i) {
    const uint32_t bits = Random ? random[i] : 0;
    float x = w.get(i);
    const float d = g.get(i) * multiplier;
    if constexpr (state_count<Rule> == 0) {
      rule(d, x);
    } else if constexpr (state_count<Rule> == 1) {
      float a = s0.get(i);
      rule(d, x, a);
      s0.put(i, a, bits);
    } else if constexpr (state_count<Rule> == 2) {
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

// The same, in two loops: comparing signs would be a tenth of a loop without caution.
template <class Rule, bool Random, class G, class W, class S0, class S1, class S2>
AMP_MP_BOTH void update(const Rule rule, float multiplier, const G g, const W w, const S0 s0,
                        const S1 s1, const S2 s2, const uint8_t* __restrict random, int n) {
  if (is_cautious(rule))
    return update_all<Rule, Random>(rule, multiplier, g, w, s0, s1, s2, random, n);
  update_all<Rule, Random>(incautious(rule), multiplier, g, w, s0, s1, s2, random, n);
}

// Whether a state draws random bits.
template <class Rule>
AMP_MP_BOTH bool draws(const Slot& slot) {
  bool any = false;
  for (int k = 0; k < state_count<Rule>; ++k) any = any || is_stochastic(slot.state[k].format);
  return any;
}

// Updates elements [begin, end) of a slot whose arrays are accessed as G, W, S0, S1 and S2 say, and
// whose random bytes are a Drawn.
template <class Rule, bool Random, class Drawn, class G, class W, class S0, class S1, class S2>
AMP_MP_BOTH void apply_as(const Slot slot, int64_t begin, int64_t end, const Rule& rule,
                          float multiplier, uint64_t seed) {
  alignas(64) float tile[kTile], master[kTile], state[kMaxStates][kTile];
  const double step = slot.clock->step;
  const bool draw_weights = is_stochastic(slot.master.format);
  Drawn bytes(random_stream(seed, step, slot.tensor_index, false), slot.origin);
  Drawn weight_bytes(random_stream(seed, step, slot.tensor_index, true), slot.origin);
  Noting noting(slot);
  for (int64_t i = begin; i < end; i += kTile) {
    const int n = int(end - i < kTile ? end - i : kTile);
    if (noting.compares()) noting.before(i, n);
    const G g = open<G>(slot.grad, i, tile, n);
    const W w = open<W>(slot.master, i, master, n);
    const S0 s0 = open<S0>(slot.state[0], i, state[0], n);
    const S1 s1 = open<S1>(slot.state[1], i, state[1], n);
    const S2 s2 = open<S2>(slot.state[2], i, state[2], n);
    const uint8_t* random = Random ? bytes.of(i, n) : nullptr;
    update<Rule, Random>(rule, multiplier, g, w, s0, s1, s2, random, n);
    if constexpr (std::is_same_v<W, Floats>) {
      if (slot.copy.data) store_tile(w.at, slot.copy, i, tile, nullptr, n);
    }
    close(w, slot.master, i, master, tile, draw_weights ? weight_bytes.of(i, n) : nullptr, n);
    if constexpr (!needs_update_norm<Rule>) {  // the update_sums pass has stored the states
      close(s0, slot.state[0], i, state[0], tile, random, n);
      close(s1, slot.state[1], i, state[1], tile, random, n);
      close(s2, slot.state[2], i, state[2], tile, random, n);
    }
    if (noting.is_wanted()) noting.after(i, n);
  }
  noting.add();
}

// Updates the last element of a slot as apply_pairs does, where it is alone.
template <class Rule, Format F0, Format F1>
AMP_MP_BOTH void apply_one(const Slot& slot, int64_t at, const Rule& rule, float multiplier,
                           uint8_t random) {
  using S0 = std::conditional_t<(state_count<Rule> > 0), Low<F0>, Nothing>;
  using S1 = std::conditional_t<(state_count<Rule> > 1), Low<F1>, Nothing>;
  update<Rule, true>(rule, multiplier, open<LowGrad>(slot.grad, at, nullptr, 1),
                     open<Joined<Split24>>(slot.master, at, nullptr, 1),
                     open<S0>(slot.state[0], at, nullptr, 1),
                     open<S1>(slot.state[1], at, nullptr, 1), Nothing{}, &random, 1);
}

// By pairs, for bfloat16 gradients, and masters in the format W whose states have the formats F0
// and F1, float32 for a state that the rule does not have.
template <class Rule, Format W, Format F0, Format F1>
AMP_MP_BOTH void apply_pairs(const Slot slot, int64_t begin, int64_t end, const Rule& rule,
                             float multiplier, uint64_t seed) {
  // Without groups more elements at a time: the loop's beginning and end cost less. With groups the
  // memory would wait while a long step is encoded.
  constexpr int kStep = is_grouped<F0> || is_grouped<F1> ? kTile : 4 * kTile;
  Halves halves[2];
  Noting noting(slot);
  const int step = noting.compares() ? kTile : kStep;
  Bytes<kStep> bytes(random_stream(seed, slot.clock->step, slot.tensor_index, false), slot.origin);
  constexpr bool kDraws = draws_random<W>, kIsPacked = kFormats[int(W)].group == kPacked;
  Bytes<kDraws ? kStep : 1> weight_bytes(
      random_stream(seed, slot.clock->step, slot.tensor_index, true), slot.origin);
  alignas(64) uint16_t widened[kIsPacked ? kStep / kPacked : 1];
  for (int64_t i = begin; i < end; i += step) {
    const int n = int(end - i < step ? end - i : step);
    if (noting.compares()) noting.before(i, n);
    const uint8_t* random = bytes.of(i, n);
    const uint8_t* weight_random = nullptr;
    if constexpr (kDraws) weight_random = weight_bytes.of(i, n);
    const GradPairs g = {reinterpret_cast<Word*>(at_element<bfloat16>(slot.grad.data, i))};
    TwoNibbles* const nibbles = at_element<TwoNibbles>(slot.master.second, i / kPacked);
    Half* remainders = reinterpret_cast<Half*>(at_element<int8_t>(slot.master.second, i));
    if constexpr (kIsPacked) widen(nibbles, remainders = widened, n / 2);
    const MasterPairs<W> w = {reinterpret_cast<Word*>(at_element<bfloat16>(slot.master.data, i)),
                              remainders};
    const StatePairs<F0> s0 = open_pairs<F0>(slot.state[0], i, halves[0], n);
    const StatePairs<F1> s1 = open_pairs<F1>(slot.state[1], i, halves[1], n);
    update_pairs(rule, multiplier, g, w, s0, s1, reinterpret_cast<const Half*>(random),
                 reinterpret_cast<const Half*>(weight_random), n / 2);
    if constexpr (kIsPacked) narrow(widened, nibbles, n / 2);
    close_pairs<F0>(slot.state[0], i, halves[0], random, n);
    close_pairs<F1>(slot.state[1], i, halves[1], random, n);
    if constexpr (!is_grouped<F0> && !is_grouped<F1>)  // groups are whole pairs
      if (n % 2 == 1) apply_one<Rule, F0, F1>(slot, i + n - 1, rule, multiplier, random[n - 1]);
    if (noting.is_wanted()) noting.after(i, n);
  }
  noting.add();
}

// Calls f.operator()<W, F0, F1>() if these are the formats of the slot's master and states; returns
// whether they are.
template <Format W, Format F0, Format F1 = Format::float32, class F>
AMP_MP_BOTH bool is_done(const Slot& slot, const F& f) {
  if (slot.master.format != W || slot.state[0].format != F0) return false;
  if (F1 != Format::float32 && slot.state[1].format != F1) return false;
  return f.template operator()<W, F0, F1>(), true;
}

template <class Rule, class F>
AMP_MP_BOTH bool with_pairs(const Slot& slot, const F& f) {
  if constexpr (state_count<Rule> == 1 || state_count<Rule> == 2) {
    using enum Format;
    if (slot.grad.format != bfloat16) return false;
    if constexpr (state_count<Rule> == 1 && is_square<Rule, 0>) {
      return is_done<bfloat16_split24, ue8m8>(slot, f) ||
             is_done<bfloat16_split24, log8>(slot, f) || is_done<bfloat16_split20, log8>(slot, f);
    } else if constexpr (state_count<Rule> == 1) {
      return is_done<bfloat16_split24, bfloat16_stochastic>(slot, f) ||
             is_done<bfloat16_split24, m8>(slot, f) || is_done<bfloat16_split20, m8>(slot, f);
    } else if constexpr (is_square<Rule, 1> && !is_square<Rule, 0>) {
      return is_done<bfloat16_split24, bfloat16_stochastic, ue8m8>(slot, f) ||
             is_done<bfloat16_split24, m8, ue8m8>(slot, f) ||
             is_done<bfloat16_split24, m8, log8>(slot, f) ||
             is_done<bfloat16_split20, m8, log8>(slot, f);
    }
  }
  return false;
}

// Chooses how to access the arrays. With bfloat16 weights the formats of memory="lean", "tiny",
// "micro" and "nano" are updated in pairs; those of "exact" and float32 masters are converted
// inside the update loop, as are the states of "lean" beside any weight; any other combination goes
// through tiles.
template <class Rule>
AMP_MP_BOTH void apply_any(const Slot& slot, int64_t begin, int64_t end, const Rule& rule,
                           float multiplier, uint64_t seed) {
  using Floats0 = std::conditional_t<(state_count<Rule> > 0), Floats, Nothing>;
  using Floats1 = std::conditional_t<(state_count<Rule> > 1), Floats, Nothing>;
  using Floats2 = std::conditional_t<(state_count<Rule> > 2), Floats, Nothing>;
  const bool random = draws<Rule>(slot);
  if (slot.origin.row_length > 0 && (random || is_stochastic(slot.master.format)))
    return apply_as<Rule, true, RowBytes, Floats, Floats, Floats0, Floats1, Floats2>(
        slot, begin, end, rule, multiplier, seed);
  if constexpr (!is_layerwise<Rule>) {
    const bool done = with_pairs<Rule>(slot, [&]<Format W, Format F0, Format F1>() {
      apply_pairs<Rule, W, F0, F1>(slot, begin, end, rule, multiplier, seed);
    });
    if (done) return;
  }
  const auto run = [&]<bool Random, class G, class W, class S0, class S1>() {
    apply_as<Rule, Random, Bytes<kTile>, G, W, S0, S1, Floats2>(slot, begin, end, rule, multiplier,
                                                                seed);
  };
  const auto run_fused = [&]<bool Random, class W, class S0, class S1>() {
    if (slot.grad.format == Format::bfloat16)
      return run.template operator()<Random, LowGrad, W, S0, S1>();
    run.template operator()<Random, Floats, W, S0, S1>();
  };
  if constexpr (!is_layerwise<Rule>) {  // these are rare: tiles only
    using Low0 = std::conditional_t<(state_count<Rule> == 0), Nothing,
                                    std::conditional_t<is_square<Rule, 0>, LowSquare, LowMoment>>;
    using Low1 = std::conditional_t<(state_count<Rule> < 2), Nothing, LowSquare>;
    const bool is_low1 = state_count<Rule> < 2 || slot.state[1].format == LowSquare::kFormat;
    if (slot.master.format == Format::bfloat16_split32 && !random)
      return run_fused.template operator()<false, Joined<Split32>, Floats0, Floats1>();
    if (slot.master.format == Format::bfloat16_float32 && !random)
      return run_fused.template operator()<false, Joined<WholeMaster>, Floats0, Floats1>();
    if constexpr (state_count<Rule> > 0) {
      if (slot.state[0].format == Low0::kFormat && is_low1)
        return run.template operator()<true, Floats, Floats, Low0, Low1>();
    }
  }
  if (random) return run.template operator()<true, Floats, Floats, Floats0, Floats1>();
  run.template operator()<false, Floats, Floats, Floats0, Floats1>();
}

template <class Rule>
void apply(const Slot& slot, int64_t begin, int64_t end, const void* made, float multiplier,
           uint64_t seed) {
  const Rule& rule = *static_cast<const Rule*>(made);
  if constexpr (has_direction<Rule>) {
    Slot step = slot;
    step.grad = slot.state[1];
    apply_any(step, begin, end, rule.step, 1.0f, seed);
  } else {
    apply_any(slot, begin, end, rule, multiplier, seed);
  }
}

}  // namespace
}  // namespace amp_mp::cpu
