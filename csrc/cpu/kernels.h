#pragma once
// The inner loops of the CPU passes, one table of them for each instruction set.
#include "plan.h"

namespace amp_mp::cpu {

template <class Rule>
struct Loops {
  void (*apply)(const Slot& slot, int64_t begin, int64_t end, const Rule& rule, float multiplier,
                uint64_t seed);
  // For rules that need their update's norm; of one kSpan at most.
  Statistics (*moments)(const Slot& slot, int64_t begin, int64_t end, const Rule& rule,
                        float multiplier, uint64_t seed);
};

#define AMP_MP_APPLY_MEMBER(Rule, op) Loops<Rule> op;

struct Kernels {
  const char* name;
  Statistics (*measure)(const Reading& reading, int64_t begin,
                        int64_t end);  // of one kSpan at most
  void (*copy)(const Transfer& transfer, int64_t begin, int64_t end, float multiplier);
  AMP_MP_FOR_EACH_RULE(AMP_MP_APPLY_MEMBER)
};
#undef AMP_MP_APPLY_MEMBER

// The best the processor has, or what the environment says: AMP_MP_CPU=baseline|avx2|avx512. Chosen
// once; null if the environment names one that is unknown or that this processor cannot run.
const Kernels* kernels();

}  // namespace amp_mp::cpu
