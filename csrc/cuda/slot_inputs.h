#pragma once
// What decide_step reads before it decides, to make the rules of its slots afterwards. It goes
// once the list "many" of benchmarks/gpu takes no longer where each slot is read when its turn
// comes.
#include "cuda/combine.h"
#include "cuda/step_arguments.h"

namespace amp_mp::cuda {

// What a slot's rule is made of. Reading the rate brings the group's other numbers near, which
// would take 24 registers here.
struct Input {
  StepInput slot;
  Clock clock;
  double rate;
};

// Those of a thread's slots. Their numbers are three loads deep in memory; those of all slots are
// requested before the first is used.
template <int kCount>
struct Inputs {
  Input input[kCount];

  template <class Plan>
  __device__ __forceinline__ void read(const Plan& plan, int first) {
    for (int k = 0; k < kCount; ++k) {
      const int t = first + k * kCombineThreads;
      input[k].slot = plan.at(t < plan.count ? t : first < plan.count ? first : 0);
    }
    for (Input& each : input) {
      each.clock = *each.slot.clock;
      Hyper hyper = plan.hyper_of(each.slot.group);
      read_rate(hyper);
      each.rate = hyper.lr;
    }
  }

  // An index would put them into local memory.
  __device__ __forceinline__ const Input& at(int k) const {
    static_assert(kCount <= 2);
    return k == 0 ? input[0] : input[kCount - 1];
  }
};

}  // namespace amp_mp::cuda
