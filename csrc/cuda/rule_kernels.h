#pragma once
// What a step launches of a rule. apply.cu defines it for every rule, in a unit for each family.
#include "cuda/passes.h"
#include "cuda/step_table.h"

namespace amp_mp::cuda {

constexpr int kApplyBlocks = 4;  // of the apply kernel, on a multiprocessor

// slot_rules: of decide_step. blocks: those that the list has work for.
struct RuleKernels {
  // Whether the kernels are compiled for the formats of a slot's states.
  bool (*is_compiled)(const Slot& slot);
  // notes: a slot's changes are noted.
  const char* (*apply)(const StepList& list, int64_t blocks, bool notes, const Verdict* verdict,
                       const void* slot_rules, const StepReportBuffer& report, cudaStream_t stream);
  // First passes of rules that have two, else null: update_sums.h, directions.h.
  const char* (*update_sums)(const StepList& list, int blocks, const Verdict* verdict,
                             const void* slot_rules, const NormInputs& norms, cudaStream_t stream);
  const char* (*directions)(const StepList& list, int blocks, const Verdict* verdict,
                            const void* slot_rules, cudaStream_t stream);
};

}  // namespace amp_mp::cuda
