#pragma once
// A step on a CUDA device: brings the table of its slots there and launches its kernels.
#include "torch/step/slots.h"

namespace amp_mp::cuda {

inline TableMemory::Held table_of(Slots& slots, const StepPlan& plan) {
  if (is_short(plan)) return TableMemory::prepare_short(slots.device());
  const TableMemory::Write write = [&](const StepTable& table, bool only_asks) {
    bool differs = false;
    on(slots.device(), [] {}, AMP_MP_CUDA(write_table(plan, table, only_asks, differs, stream)));
    return differs;
  };
  return slots.table_memory().prepare(slots.size(), slots.groups(), slots.device(), write);
}

// `chosen`: the slots with a gradient; the other arguments are those of cuda::apply.
template <class Rule>
const char* apply_step(Slots& slots, const std::vector<Slot>& chosen, const Hyper* hypers,
                       const DecideInputs* inputs, Verdict* verdict, const SpanSums& grads,
                       const SpanSums& weights, SlotRule<Rule>* slot_rules, const NormInputs& norms,
                       void* stream) {
  const auto count = int64_t(chosen.size());
  const StepPlan plan = {chosen.data(), count, hypers, chunk_of(chosen.data(), count),
                         needs_update_norm<Rule>};
  const TableMemory::Held held = table_of(slots, plan);
  return apply<Rule>(plan, held.table, inputs, verdict, grads, weights, slot_rules, norms, stream);
}

}  // namespace amp_mp::cuda
