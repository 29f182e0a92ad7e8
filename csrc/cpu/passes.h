#pragma once
// The passes on a CPU, for csrc/torch to call: lists of tensors, cut over `threads` threads.
#include "plan.h"

namespace amp_mp::cpu {

// Number of spans of 65,536 elements, each tensor beginning a new one.
int64_t count_spans(const Reading* readings, int64_t count);

// `spans` is scratch for count_spans Statistics. `tensors` gets count + 1, the last is the total.
void measure(const Reading* readings, int64_t count, Statistics* spans, Statistics* tensors,
             int threads);

void copy(const Transfer* transfers, int64_t count, double multiplier, int threads);

// Moves each average towards its next value; decay 0 copies, decay 1 changes nothing.
void average(const Transfer* transfers, int64_t count, double decay, int threads);

// Notes which weights are others than before.
void compare(const Comparison* comparisons, int64_t count, int threads);

// counts: of each chunk, how many bits are set.
void count_bits(const Watched* watched, int64_t count, int32_t* counts, int threads);

// Looks at all of them and gathers, while a chunk is in the cache, the changes of those with
// positions. gatherings: one for each, or null.
void look(const Watched* watched, const Gathering* gatherings, int64_t count, int threads);

// bad: for each, how many positions lie outside of the tensor.
void check_positions(const Scattering* scatterings, int64_t count, int32_t* bad, int threads);
void scatter(const Scattering* scatterings, int64_t count, int threads);

// Ticks each slot's clock and updates its arrays. The caller has already looked at the verdict:
// this step is not skipped. `rules` is scratch for `count` rules of rule.bytes each.
void apply(const RuleInfo& rule, const Slot* slots, int64_t count, const Hyper* hypers,
           double multiplier, void* rules, const NormInputs& norms, int threads);

}  // namespace amp_mp::cpu
