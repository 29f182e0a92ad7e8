// A step from its decision to its last kernel.
#include "core/rules.h"
#include "cuda/rule_kernels.h"

namespace amp_mp::cuda {

#define AMP_MP_DECLARE(Rule, op) extern const RuleKernels op;
AMP_MP_FOR_EACH_RULE(AMP_MP_DECLARE)

namespace {

#define AMP_MP_NAME(Rule, op) &op,
const RuleKernels* const kKernels[] = {AMP_MP_FOR_EACH_RULE(AMP_MP_NAME)};

}  // namespace

int chunk_of(const Slot* slots, int64_t count) {
  return chunk_elements(count_elements(slots, count), kApplyBlocks);
}

const char* apply(const RuleInfo& rule, const StepPlan& plan, const StepTable& table,
                  const Criteria* inputs, Verdict* verdict, const SpanSums& grads,
                  const SpanSums& weights, void* slot_rules, const NormInputs& norms,
                  void* stream) {
  const RuleKernels& kernels = *kKernels[rule.index];
  bool notes = false;
  for (int64_t i = 0; i < plan.count; ++i) {
    if (!kernels.is_compiled(plan.slots[i]))
      return "a state is in a format that states of its kind cannot be stored in (amp_mp.formats)";
    notes = notes || plan.slots[i].changes.sum;
  }
  const auto queue = static_cast<cudaStream_t>(stream);
  const int64_t blocks = blocks_of(plan, table, false);
  StepList list = list_of(plan, table, false);
  // A block of apply writes the report, since a write to the host's memory takes longer than all of
  // decide. Not if a callback might raise an error, and there were no apply.
  const bool has_report =
      inputs && inputs->report_buffer.reports && blocks > 0 && !norms.gather && !norms.make_updates;
  list.first_block = has_report;
  if (const char* error = decide_step(rule, plan, table, inputs, verdict, grads, weights,
                                      slot_rules, norms, false, !has_report, stream))
    return error;
  if (rule.has_direction) {
    const char* error = blocks > 0 ? kernels.directions(list_of(plan, table, false), int(blocks),
                                                        verdict, slot_rules, queue)
                                   : nullptr;
    if (error) return error;
    if (norms.make_updates) norms.make_updates(norms.directions);
  }
  if (rule.needs_update_norm) {
    if (const char* error =
            kernels.update_sums(list_of(plan, table, true), blocks_of(plan, table, true), verdict,
                                slot_rules, norms, queue))
      return error;
    SpanSums updates = {norms.update_spans, norms.first_span, norms.ticket, norms.updates,
                        kUpdateSums * plan.count};
    NormInputs known = norms;
    if (norms.gather) {
      if (const char* error = combine(updates, stream)) return error;
      known.gathered = norms.gather(norms.context);
      updates = {};
    }
    if (const char* error = decide_step(rule, plan, table, nullptr, verdict, updates, SpanSums{},
                                        slot_rules, known, true, false, stream))
      return error;
  }
  if (blocks == 0) return nullptr;
  return kernels.apply(list, blocks, notes, verdict, slot_rules,
                       has_report ? inputs->report_buffer : StepReportBuffer{}, queue);
}

}  // namespace amp_mp::cuda
