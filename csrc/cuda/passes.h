#pragma once
// The passes on a GPU. Plain data in; every pointer but `slots` and its like is device memory,
// `stream` is a cudaStream_t. Work is queued, nothing waits. Each returns null or what CUDA said.
#include "plan.h"

namespace amp_mp::cuda {

// What measuring a list leaves: spans that somebody has to add.
struct Parts {
  Statistics* spans = nullptr;    // of all tensors; null where nothing is left to add
  int64_t* first_span = nullptr;  // count + 1
  unsigned* ticket = nullptr;     // 0 after measuring
  Statistics* tensors = nullptr;  // count + 1, to be filled: the last is the total; null: no list
  int64_t count = 0;              // of tensors
};

const char* measure(const Reading* readings, const Parts& parts, void* stream);
const char* combine(const Parts& parts, void* stream);

// total may be null.
const char* decide(const Statistics* total, const Decision& decision, Verdict* verdict,
                   void* stream);

// With a verdict its multiplier counts and an overflow copies nothing; without one, `multiplier`.
const char* copy(const Transfer* transfers, int64_t count, const Verdict* verdict,
                 double multiplier, void* stream);

// A step: adds what `grads` and `weights` have left, decides (without a decision, `verdict` is
// given), ticks each slot's clock and updates it, unless the verdict says overflow. The decision is
// about the total of `grads`. `ready` has room for `count`. measured: as on the CPU.
template <class Rule>
const char* apply(const Slot* slots, int64_t count, const Hyper* hypers, const Decision* decision,
                  Verdict* verdict, const Parts& grads, const Parts& weights, Ready<Rule>* ready,
                  const Measured& measured, void* stream);

// Parts of apply. begin: everything that comes before the tensors are touched; `again` where only
// the norms of the updates are new.
template <class Rule>
const char* begin(const Slot* slots, int64_t count, const Hyper* hypers, const Decision* decision,
                  Verdict* verdict, const Parts& grads, const Parts& weights, Ready<Rule>* ready,
                  const Measured& measured, bool again, void* stream);
template <class Rule>
const char* prepare(const Slot* slots, int64_t count, const Verdict* verdict,
                    const Ready<Rule>* ready, const Measured& measured, void* stream);

// max_abs may be null for policies that do not look at it.
const char* move_scale(const NextScale& next, const double* found_inf, const double* max_abs,
                       const Ring& ring, void* stream);

// What is asked of the CUDA runtime besides launches.
bool is_capturing(void* stream);
const char* synchronize(void* stream);
// Host memory that devices can write, for good; null if refused. Not while a stream captures.
void* allocate_for_both(size_t bytes);

}  // namespace amp_mp::cuda
