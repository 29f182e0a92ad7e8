// The apply pass of a step in which the changes of a weight are noted. In kernels of their own it
// costs other steps neither a branch nor a register.
#include "cuda/apply_loop.h"

namespace amp_mp::cuda {
namespace {

constexpr int kBlocks = 3;  // per multiprocessor: with four, noting would spill registers

template <class Rule>
__global__ void __launch_bounds__(kThreads, kBlocks)
    apply_noting_kernel(const StepList __grid_constant__ table, const Verdict* __restrict__ verdict,
                        const SlotRule<Rule>* __restrict__ slot_rules, StepReportBuffer report) {
  apply_block<Rule, true, typename LayoutsOf<Rule>::type>(table, verdict, slot_rules, report);
}

}  // namespace

template <class Rule>
const char* apply_noting(const StepList& list, int64_t blocks, const Verdict* verdict,
                         const SlotRule<Rule>* slot_rules, const StepReportBuffer& report,
                         void* stream) {
  return message(launch(apply_noting_kernel<Rule>, list.first_block + blocks, kThreads,
                        static_cast<cudaStream_t>(stream), list, verdict, slot_rules, report));
}

#define AMP_MP_INSTANTIATE(Rule, op)                                                \
  template const char* apply_noting<Rule>(const StepList&, int64_t, const Verdict*, \
                                          const SlotRule<Rule>*, const StepReportBuffer&, void*);
AMP_MP_FOR_EACH_RULE(AMP_MP_INSTANTIATE)

}  // namespace amp_mp::cuda
