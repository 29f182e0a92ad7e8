#pragma once
// The first pass of rules with directions (Muon): advances the momentum and stores each element's
// direction. Thread blocks and threads have the elements that they have in apply. Included by
// apply.cu.
#include "cuda/apply_loop.h"

namespace amp_mp::cuda {
namespace {

template <class Rule>
__global__ void __launch_bounds__(kThreads)
    directions_kernel(const StepList __grid_constant__ table, const Verdict* __restrict__ verdict,
                      const SlotRule<Rule>* __restrict__ slot_rules) {
  const double skip = verdict->skip;  // arrives while the chunk is looked for
  const Chunk chunk = find_chunk(table);
  if (skip != 0) return;

  const SlotRule<Rule>& slot_rule = slot_rules[chunk.slot];
  const View<Rule> slot(table.entries[chunk.slot], slot_rule);
  const Rule rule = slot_rule.rule;
  const float multiplier = slot_rule.multiplier;
  const bool draws = slot.draws();
  // Every thread runs the same number of iterations, because groups exchange numbers between
  // threads.
  for (int base = 0; base < chunk.size; base += kThreads * kPack) {
    const int i = base + int(threadIdx.x) * kPack, n = chunk.size - i;
    const int64_t at = chunk.begin + i;
    const bool whole = slot.wide && has_eight(n);
    Held<kGradFormats> grad;
    Held<kFormatsOfState<Rule, 0>> momentum;
    grad.read(slot.grad, at, n, whole);
    momentum.read(slot.state[0], at, n, whole);
    float g[kPack], m[kPack], direction[kPack];
    grad.decode(slot.grad.format, g);
    momentum.decode(slot.state[0].format, m);
    for (int k = 0; k < kPack; ++k) direction[k] = rule.advance(g[k] * multiplier, m[k]);
    const uint64_t random = draws ? slot.again().randomness().eight(false, at) : 0;
    store_history<kFormatsOfState<Rule, 0>>(slot.state[0], m, at, n, whole, random);
    store<kFormatsOfState<Rule, 1>>(slot.state[1], direction, at, n, whole);
  }
}

template <class Rule>
const char* launch_directions(const StepList& list, int blocks, const Verdict* verdict,
                              const void* slot_rules, cudaStream_t stream) {
  return message(launch(directions_kernel<Rule>, blocks, kThreads, stream, list, verdict,
                        static_cast<const SlotRule<Rule>*>(slot_rules)));
}

}  // namespace
}  // namespace amp_mp::cuda
