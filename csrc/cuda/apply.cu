// The apply pass: reads every array of a step once, updates it and writes it back. There is one
// kernel for each rule; a slot's formats are a tag, the same for a whole block of threads.
#include "cuda/passes.h"
#include "cuda/slot_table.h"
#include "cuda/step_report.h"

namespace amp_mp::cuda {
namespace {

constexpr int kThreads = 128;
// Blocks per multiprocessor. Without this bound ptxas saves registers and splits the loads; with
// four, some rules would spill registers.
template <class Rule>
constexpr int kBlocks = Rule::kStates > 2 ? 2 : 4;
template <>
constexpr int kBlocks<RMSprop> = 3;
template <>
constexpr int kBlocks<Adamax> = 3;

template <class Rule>
__global__ void __launch_bounds__(kThreads, kBlocks<Rule>)
    apply_kernel(const StepList __grid_constant__ table, const Verdict* __restrict__ verdict,
                 const SlotRule<Rule>* __restrict__ slot_rules, StepReportBuffer report) {
  if (int(blockIdx.x) < table.first_block) {
    if (threadIdx.x == 0) write_report(report, *verdict, report.counts->next_scale);
    return;
  }
  const double found_inf = verdict->found_inf;  // arrives while the chunk is looked for
  const Chunk chunk = find_chunk(table);
  if (found_inf != 0) return;
  const View<Rule> slot(table, slot_rules, chunk.slot);
  const Rule rule = slot.slot_rule().rule;
  const float multiplier = slot.slot_rule().multiplier;
  const bool draws = slot.draws(), draws_weights = is_stochastic(slot.master.format);

  // Every thread runs the same number of iterations, because groups exchange numbers between
  // threads.
  for (int base = 0; base < chunk.size; base += kThreads * kPack) {
    const int i = base + int(threadIdx.x) * kPack, left = chunk.size - i;
    const int n = left < 0 ? 0 : left < kPack ? left : kPack;
    const bool whole = slot.wide && n == kPack;
    const int64_t at = chunk.begin + i;
    Held<kGradFormats> grad;
    Held<kMasterFormats> master;
    Held<kFormatsOfState<Rule, 0>> first;
    Held<kFormatsOfState<Rule, 1>> second;
    Held<kFormatsOfState<Rule, 2>> third;
    grad.read(slot.grad, at, n, whole);
    master.read(slot.master, at, n, whole);
    if constexpr (Rule::kStates > 0) first.read(slot.state[0], at, n, whole);
    if constexpr (Rule::kStates > 1) second.read(slot.state[1], at, n, whole);
    if constexpr (Rule::kStates > 2) third.read(slot.state[2], at, n, whole);
    float g[kPack], w[kPack], s0[kPack], s1[kPack], s2[kPack];
    grad.decode(slot.grad.format, g);
    master.decode(slot.master.format, w);
    if constexpr (Rule::kStates > 0) first.decode(slot.state[0].format, s0);
    if constexpr (Rule::kStates > 1) second.decode(slot.state[1].format, s1);
    if constexpr (Rule::kStates > 2) third.decode(slot.state[2].format, s2);
    for (int k = 0; k < kPack; ++k) {
      if constexpr (Rule::kStates == 0) rule(g[k] * multiplier, w[k]);
      if constexpr (Rule::kStates == 1) rule(g[k] * multiplier, w[k], s0[k]);
      if constexpr (Rule::kStates == 2) rule(g[k] * multiplier, w[k], s0[k], s1[k]);
      if constexpr (Rule::kStates == 3) rule(g[k] * multiplier, w[k], s0[k], s1[k], s2[k]);
    }
    store_history<kMasterFormats>(slot.master, w, at, n, whole,
                                  draws_weights ? slot.random(true, at) : 0);
    if (slot.has_copy) store_history<kGradFormats>(slot.copy, w, at, n, whole);
    if constexpr (!needs_update_norm<Rule>) {  // the moments pass has stored the states
      const uint64_t random = draws ? slot.random(false, at) : 0;
      if constexpr (Rule::kStates > 0)
        store_history<kFormatsOfState<Rule, 0>>(slot.state[0], s0, at, n, whole, random);
      if constexpr (Rule::kStates > 1)
        store_history<kFormatsOfState<Rule, 1>>(slot.state[1], s1, at, n, whole, random);
      if constexpr (Rule::kStates > 2)
        store_history<kFormatsOfState<Rule, 2>>(slot.state[2], s2, at, n, whole, random);
    }
  }
}

}  // namespace

template <class Rule>
int chunk_of(const Slot* slots, int64_t count) {
  return chunk_elements(count_elements(slots, count), kBlocks<Rule>);
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
  // decide. Not if `gather` might raise an error, and there were no apply.
  const bool has_report = inputs && inputs->report_buffer.reports && blocks > 0 && !norms.gather;
  list.first_block = has_report;
  if (const char* error = decide_step<Rule>(plan, table, inputs, verdict, grads, weights,
                                            slot_rules, norms, false, !has_report, stream))
    return error;
  if constexpr (needs_update_norm<Rule>) {
    if (const char* error = moments<Rule>(plan, table, verdict, slot_rules, norms, stream))
      return error;
    SpanSums updates = {norms.update_spans, norms.first_span, norms.ticket, norms.updates,
                        plan.count};
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
  return message(launch(
      apply_kernel<Rule>, list.first_block + blocks, kThreads, static_cast<cudaStream_t>(stream),
      list, static_cast<const Verdict*>(verdict), static_cast<const SlotRule<Rule>*>(slot_rules),
      has_report ? inputs->report_buffer : StepReportBuffer{}));
}

#define AMP_MP_INSTANTIATE(Rule, op)                                                            \
  template int chunk_of<Rule>(const Slot*, int64_t);                                            \
  template const char* apply<Rule>(const StepPlan&, const StepTable&, const DecideInputs*,      \
                                   Verdict*, const SpanSums&, const SpanSums&, SlotRule<Rule>*, \
                                   const NormInputs&, void*);
AMP_MP_FOR_EACH_RULE(AMP_MP_INSTANTIATE)

}  // namespace amp_mp::cuda
