// The kernels that update elements, of one family of rules (core/family.h): the apply pass, which
// reads every array of a step once, updates it and writes it back, and the passes before it that
// some rules have.
#include "core/family.h"
#include "cuda/apply_loop.h"
#include "cuda/directions.h"
#include "cuda/rule_kernels.h"
#include "cuda/update_sums.h"

namespace amp_mp::cuda {
namespace {

// Without this bound ptxas saves registers and splits the loads; with five blocks, some rules would
// spill registers.
template <class Rule>
__global__ void __launch_bounds__(kThreads, kApplyBlocks)
    apply_kernel(const StepList __grid_constant__ table, const Verdict* __restrict__ verdict,
                 const SlotRule<Rule>* __restrict__ slot_rules, StepReportBuffer report) {
  apply_block<Rule, false, typename LayoutsOf<Rule>::type>(table, verdict, slot_rules, report);
}

// Of a step in which the changes of a weight are noted. In a kernel of its own it costs other steps
// neither a branch nor a register.
constexpr int kNotingBlocks = 3;  // with four, noting would spill registers
template <class Rule>
__global__ void __launch_bounds__(kThreads, kNotingBlocks)
    apply_noting_kernel(const StepList __grid_constant__ table, const Verdict* __restrict__ verdict,
                        const SlotRule<Rule>* __restrict__ slot_rules, StepReportBuffer report) {
  apply_block<Rule, true, NotingLayoutsOf<Rule>>(table, verdict, slot_rules, report);
}

template <class Rule>
const char* launch_apply(const StepList& list, int64_t blocks, bool notes, const Verdict* verdict,
                         const void* slot_rules, const StepReportBuffer& report,
                         cudaStream_t stream) {
  const auto kernel = notes ? apply_noting_kernel<Rule> : apply_kernel<Rule>;
  return message(launch(kernel, list.first_block + blocks, kThreads, stream, list, verdict,
                        static_cast<const SlotRule<Rule>*>(slot_rules), report));
}

template <class Rule>
constexpr RuleKernels kernels_of() {
  RuleKernels kernels = {is_compiled<Rule>, launch_apply<Rule>, nullptr, nullptr};
  if constexpr (needs_update_norm<Rule>) kernels.update_sums = launch_update_sums<Rule>;
  if constexpr (has_direction<Rule>) kernels.directions = launch_directions<Rule>;
  return kernels;
}

}  // namespace

#define AMP_MP_KERNELS(Rule, op) \
  extern const RuleKernels op;   \
  const RuleKernels op = kernels_of<Rule>();
AMP_MP_FOR_EACH_RULE_OF_FAMILY(AMP_MP_KERNELS)

}  // namespace amp_mp::cuda
