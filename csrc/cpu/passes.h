#pragma once
// The passes on a CPU: lists of tensors cut over threads. No torch; the caller says how many
// threads.
#include "plan.h"

namespace amp_mp::cpu {

// `spans` has room for count_spans(readings, count), `tensors` for count + 1: the last is the
// total.
int64_t count_spans(const Reading* readings, int64_t count);
void measure(const Reading* readings, int64_t count, Statistics* spans, Statistics* tensors,
             int threads);

void copy(const Transfer* transfers, int64_t count, double multiplier, int threads);

// Ticks each slot's clock and updates it. The verdict has been looked at: this step is applied.
// `rules` has room for count rules.
template <class Rule>
void apply(const Slot* slots, int64_t count, const Hyper* hypers, double multiplier, Rule* rules,
           const NormInputs& norms, int threads);

}  // namespace amp_mp::cpu
