#pragma once
// The first pass of rules that have two: advances the moments, and measures the update (LAMB) or
// stores the update's direction (Muon). Included by loops.cpp.
#include "cpu/apply.h"
#include "cpu/measure.h"

namespace amp_mp::cpu {
namespace {

template <class Rule>
AMP_MP_BOTH void advance(const Rule rule, float multiplier, const float* __restrict g,
                         const float* __restrict w, float* __restrict m, float* __restrict v,
                         float* __restrict direction, int n) {
  for (int k = 0; k < n; ++k) {
    rule.moments(g[k] * multiplier, w[k], m[k], v[k]);
    direction[k] = rule.direction(w[k], m[k], v[k]);
  }
}

template <class Rule>
AMP_MP_BOTH void advance(const Rule rule, float multiplier, const float* __restrict g,
                         float* __restrict m, float* __restrict direction, int n) {
  for (int k = 0; k < n; ++k) direction[k] = rule.advance(g[k] * multiplier, m[k]);
}

// Advances the momentum of elements [begin, end) and stores their directions.
template <class Rule>
AMP_MP_BOTH void store_directions(const Slot& slot, int64_t begin, int64_t end, const Rule& rule,
                                  float multiplier, uint64_t seed) {
  alignas(64) float direction[kTile], tile[kTile], state[kTile];
  RowBytes bytes(random_stream(seed, slot.clock->step, slot.tensor_index, false), slot.origin);
  const bool random = draws<Rule>(slot);
  for (int64_t i = begin; i < end; i += kTile) {
    const int n = int(end - i < kTile ? end - i : kTile);
    const float* g = open_tile(slot.grad, i, tile, n);
    float* m = open_tile(slot.state[0], i, state, n);
    advance(rule, multiplier, g, m, direction, n);
    if (m == state) store_tile(m, slot.state[0], i, tile, random ? bytes.of(i, n) : nullptr, n);
    store_tile(direction, slot.state[1], i, tile, nullptr, n);
  }
}

// Statistics of the update of elements [begin, end), at most one span. `rule` was made without the
// update's norm. Of a rule with directions there are none.
template <class Rule>
Statistics moments(const Slot& slot, int64_t begin, int64_t end, const Rule& rule, float multiplier,
                   uint64_t seed) {
  Statistics total = {};
  if constexpr (has_direction<Rule>) {
    store_directions(slot, begin, end, rule, multiplier, seed);
  } else if constexpr (needs_update_norm<Rule>) {
    alignas(64) float direction[kBlock], tile[kTile], master[kTile], state[2][kTile];
    RowBytes bytes(random_stream(seed, slot.clock->step, slot.tensor_index, false), slot.origin);
    const bool random = draws<Rule>(slot);
    for (int64_t block = begin; block < end; block += kBlock) {
      const int64_t stop = end < block + kBlock ? end : block + kBlock;
      for (int64_t i = block; i < stop; i += kTile) {
        const int n = int(stop - i < kTile ? stop - i : kTile);
        const float* g = open_tile(slot.grad, i, tile, n);
        const float* w = open_tile(slot.master, i, master, n);
        float* m = open_tile(slot.state[0], i, state[0], n);
        float* v = open_tile(slot.state[1], i, state[1], n);
        advance(rule, multiplier, g, w, m, v, direction + (i - block), n);
        const uint8_t* drawn = random ? bytes.of(i, n) : nullptr;
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
