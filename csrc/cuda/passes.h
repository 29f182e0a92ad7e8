#pragma once
// The passes on a GPU. Plain data in; every pointer but `slots` and its like is device memory,
// `stream` is a cudaStream_t. Work is queued, nothing waits. Each returns null or what CUDA said.
#include "plan.h"

namespace amp_mp::cuda {

// `spans` has room for the spans of all tensors, `first_span` for count + 1 numbers, `tensors` for
// count + 1 statistics: the last is the total.
const char* measure(const Reading* readings, int64_t count, Statistics* spans, int64_t* first_span,
                    Statistics* tensors, void* stream);

// total, scale and found_inf may be null.
const char* decide(const Statistics* total, const float* scale, const float* found_inf,
                   double max_norm, Verdict* verdict, void* stream);

// With a verdict its multiplier counts and an overflow copies nothing; without one, `multiplier`.
const char* copy(const Transfer* transfers, int64_t count, const Verdict* verdict,
                 double multiplier, void* stream);

// Ticks each slot's clock and updates it, unless the verdict says overflow. `rules` has room for
// count rules.
template <class Rule>
const char* apply(const Slot* slots, int64_t count, const Hyper* hypers, const Verdict* verdict,
                  Rule* rules, const Measured& measured, void* stream);

// Parts of the above: the first pass of a rule that needs its update's norm, and the sum of spans.
template <class Rule>
const char* prepare(const Slot* slots, int64_t count, const Hyper* hypers, const Verdict* verdict,
                    const Rule* rules, const Measured& measured, void* stream);
const char* combine(const Statistics* spans, const int64_t* first_span, int64_t count,
                    Statistics* tensors, void* stream);

// max_abs may be null for policies that do not look at it.
const char* update_scale(double* state, const float* found_inf, const double* max_abs,
                         void* stream);

}  // namespace amp_mp::cuda
