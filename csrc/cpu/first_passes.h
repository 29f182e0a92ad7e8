#pragma once
// The first pass of rules that have two: advances the moments, and stores the update's direction
// (Muon) or adds up squares of the update and the weights (LAMB). MuonH does the first, then, with
// the directions made orthogonal, the second. Included by apply.cpp.
#include "cpu/apply.h"

namespace amp_mp::cpu {
namespace {

template <class Rule>
AMP_MP_BOTH void advance(const Rule rule, float multiplier, const float* __restrict g,
                         const float* __restrict w, float* __restrict m, float* __restrict v,
                         int n) {
  for (int k = 0; k < n; ++k) rule.moments(g[k] * multiplier, w[k], m[k], v[k]);
}

template <class Rule>
AMP_MP_BOTH void advance(const Rule rule, float multiplier, const float* __restrict g,
                         float* __restrict m, float* __restrict direction, int n) {
  for (int k = 0; k < n; ++k) direction[k] = rule.advance(g[k] * multiplier, m[k]);
}

// Advances the momentum of elements [begin, end) and stores their directions.
template <class Rule>
void directions(const Slot& slot, int64_t begin, int64_t end, const void* made, float multiplier,
                uint64_t seed) {
  if constexpr (has_direction<Rule>) {
    const Rule& rule = *static_cast<const Rule*>(made);
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
}

// The lanes of a block, in which a tile's sums are added.
struct UpdateLanes {
  alignas(64) double update[kLanes] = {}, along[kLanes] = {}, weight[kLanes] = {};

  AMP_MP_BOTH void add(const float* u, const float* w, int n) {
    const int whole = n / kLanes * kLanes;
    for (int i = 0; i < whole; i += kLanes) add_row(u + i, w + i);
    if (whole == n) return;
    alignas(64) float u_row[kLanes] = {}, w_row[kLanes] = {};  // zeros add nothing
    memcpy(u_row, u + whole, size_t(n - whole) * sizeof(float));
    memcpy(w_row, w + whole, size_t(n - whole) * sizeof(float));
    add_row(u_row, w_row);
  }
  AMP_MP_BOTH void add_row(const float* __restrict u, const float* __restrict w) {
    for (int j = 0; j < kLanes; ++j) {
      const bool counts = is_finite(u[j]) & is_finite(w[j]);
      const double a = select(counts, u[j], 0.0f), b = select(counts, w[j], 0.0f);
      update[j] += a * a;
      along[j] += a * b;
      weight[j] += b * b;
    }
  }
  AMP_MP_BOTH UpdateSums sums() {
    return {add_halving(update), add_halving(along), add_halving(weight)};
  }
};

// A tile's states with the moments advanced, as they are stored.
struct Advanced {
  float *m, *v;
};

template <class Rule, class Drawn>
AMP_MP_BOTH Advanced advance_tile(const Slot& slot, int64_t i, const Rule& rule, float multiplier,
                                  const float* w, float (&state)[2][kTile], Drawn& bytes,
                                  bool random, int n) {
  alignas(64) float tile[kTile];
  const auto open = [&](int k) { return open_tile(slot.state[k], i, state[k], n); };
  const Advanced now = {open(0), open(1)};
  advance(rule, multiplier, open_tile(slot.grad, i, tile, n), w, now.m, now.v, n);
  const uint8_t* drawn = random ? bytes.of(i, n) : nullptr;
  if (now.m == state[0]) store_tile(now.m, slot.state[0], i, tile, drawn, n);
  if (now.v == state[1]) store_tile(now.v, slot.state[1], i, tile, drawn, n);
  return {open(0), open(1)};
}

// Sums over the update of elements [begin, end), at most one span, and their weights. The rule was
// made without these. Advances the moments of a rule without directions.
template <class Rule>
UpdateSums update_sums(const Slot& slot, int64_t begin, int64_t end, const void* made,
                       float multiplier, uint64_t seed) {
  UpdateSums total = {};
  if constexpr (needs_update_norm<Rule>) {
    const Rule& rule = *static_cast<const Rule*>(made);
    alignas(64) float update[kTile], master[kTile];
    [[maybe_unused]] alignas(64) float state[2][kTile];
    RowBytes bytes(random_stream(seed, slot.clock->step, slot.tensor_index, false), slot.origin);
    [[maybe_unused]] const bool random = draws<Rule>(slot);
    for (int64_t block = begin; block < end; block += kBlock) {
      const int64_t stop = end < block + kBlock ? end : block + kBlock;
      UpdateLanes lanes;
      for (int64_t i = block; i < stop; i += kTile) {
        const int n = int(stop - i < kTile ? stop - i : kTile);
        const float* w = open_tile(slot.master, i, master, n);
        const float* u = update;
        if constexpr (has_direction<Rule>) {
          u = open_tile(slot.state[1], i, update, n);
        } else {
          const Advanced now = advance_tile(slot, i, rule, multiplier, w, state, bytes, random, n);
          for (int k = 0; k < n; ++k) update[k] = rule.direction(w[k], now.m[k], now.v[k]);
        }
        lanes.add(u, w, n);
      }
      add_to(total, lanes.sums());
    }
  }
  return total;
}

}  // namespace
}  // namespace amp_mp::cpu
