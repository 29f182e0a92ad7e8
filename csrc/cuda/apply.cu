// The apply pass: reads every array of a step once, updates it and writes it back. There is one
// kernel for each rule, and another one in apply_noting.cu.
#include "cuda/apply_loop.h"

namespace amp_mp::cuda {
namespace {

// Blocks per multiprocessor. Without this bound ptxas saves registers and splits the loads; with
// five, some rules would spill registers.
constexpr int kBlocks = 4;

template <class Rule>
__global__ void __launch_bounds__(kThreads, kBlocks)
    apply_kernel(const StepList __grid_constant__ table, const Verdict* __restrict__ verdict,
                 const SlotRule<Rule>* __restrict__ slot_rules, StepReportBuffer report) {
  apply_block<Rule, false, typename LayoutsOf<Rule>::type>(table, verdict, slot_rules, report);
}

}  // namespace

int chunk_of(const Slot* slots, int64_t count) {
  return chunk_elements(count_elements(slots, count), kBlocks);
}

template <class Rule>
const char* apply(const StepPlan& plan, const StepTable& table, const DecideInputs* inputs,
                  Verdict* verdict, const SpanSums& grads, const SpanSums& weights,
                  SlotRule<Rule>* slot_rules, const NormInputs& norms, void* stream) {
  for (int64_t i = 0; i < plan.count; ++i)
    if (!is_compiled<Rule>(plan.slots[i]))
      return "a state is in a format that states of its kind cannot be stored in (amp_mp.formats)";
  const int64_t blocks = blocks_of(plan, table, false);
  StepList list = list_of(plan, table, false);
  // A block of apply writes the report, since a write to the host's memory takes longer than all of
  // decide. Not if a callback might raise an error, and there were no apply.
  const bool has_report =
      inputs && inputs->report_buffer.reports && blocks > 0 && !norms.gather && !norms.make_updates;
  list.first_block = has_report;
  if (const char* error = decide_step<Rule>(plan, table, inputs, verdict, grads, weights,
                                            slot_rules, norms, false, !has_report, stream))
    return error;
  if constexpr (has_direction<Rule>) {
    if (const char* error = directions<Rule>(plan, table, verdict, slot_rules, stream))
      return error;
    if (norms.make_updates) norms.make_updates(norms.directions);
  }
  if constexpr (needs_update_norm<Rule>) {
    if (const char* error = moments<Rule>(plan, table, verdict, slot_rules, norms, stream))
      return error;
    SpanSums updates = {norms.update_spans, norms.first_span, norms.ticket, norms.updates,
                        kUpdateSums * plan.count};
    NormInputs known = norms;
    if (norms.gather) {
      if (const char* error = combine(updates, stream)) return error;
      known.gathered = norms.gather(norms.context);
      updates = {};
    }
    if (const char* error = decide_step<Rule>(plan, table, nullptr, verdict, updates, SpanSums{},
                                              slot_rules, known, true, false, stream))
      return error;
  }
  if (blocks == 0) return nullptr;
  const StepReportBuffer report = has_report ? inputs->report_buffer : StepReportBuffer{};
  for (int64_t i = 0; i < plan.count; ++i)
    if (plan.slots[i].changes.sum)
      return apply_noting(list, blocks, verdict, slot_rules, report, stream);
  return message(launch(apply_kernel<Rule>, list.first_block + blocks, kThreads,
                        static_cast<cudaStream_t>(stream), list,
                        static_cast<const Verdict*>(verdict),
                        static_cast<const SlotRule<Rule>*>(slot_rules), report));
}

AMP_MP_FOR_EACH_RULE(AMP_MP_INSTANTIATE_APPLY)

}  // namespace amp_mp::cuda
