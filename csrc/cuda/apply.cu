// The apply pass: reads every array of a step once, updates it and writes it back. There is one
// kernel for each rule. A slot's formats are a tag, the same for a whole block of threads; for
// common tags (cuda/layouts.h) the loop is compiled with the formats known.
#include <type_traits>

#include "cuda/passes.h"
#include "cuda/quotient.h"
#include "cuda/slot_table.h"
#include "cuda/step_report.h"

namespace amp_mp::cuda {
namespace {

constexpr int kThreads = 128;
// Blocks per multiprocessor. Without this bound ptxas saves registers and splits the loads; with
// five, some rules would spill registers.
constexpr int kBlocks = 4;

// Updates eight elements.
template <class Rule, class... States>
__device__ __forceinline__ void update(const Rule& rule, float multiplier, const float (&g)[kPack],
                                       float (&w)[kPack], States (&... states)[kPack]) {
  if constexpr (divides_by_root<Rule>) {
    Fraction fraction[kPack];
    float quotient[kPack];
    for (int k = 0; k < kPack; ++k)
      fraction[k] = rule.moments(g[k] * multiplier, w[k], states[k]...);
    divide_all(rule.divide, fraction, quotient);
    for (int k = 0; k < kPack; ++k) rule.take(quotient[k], w[k], states[k]...);
  } else {
    for (int k = 0; k < kPack; ++k) rule(g[k] * multiplier, w[k], states[k]...);
  }
}

// What takes the place of the gradient: the update that was made of the directions, if there is
// one.
template <class Rule>
constexpr FormatSet kSourceFormats = has_direction<Rule> ? just(Format::bfloat16) : kGradFormats;
template <class Rule, uint32_t Layout>
__device__ __forceinline__ const Array& source_of(const View<Rule, Layout>& slot) {
  if constexpr (has_direction<Rule>) return slot.state[state_count<Rule> - 1];
  return slot.grad;
}

template <class Rule, uint32_t Layout>
__device__ __forceinline__ void apply_chunk(const SlotEntry* entries, const Chunk& chunk,
                                            const SlotRule<Rule>* slot_rules) {
  const int index = chunk.slot + unknown_zero();
  const SlotRule<Rule>& slot_rule = slot_rules[index];
  const View<Rule, Layout> slot(entries[index], slot_rule);
  const Randomness randomness = slot.randomness();
  const Rule rule = slot_rule.rule;
  const float multiplier = has_direction<Rule> ? 1.0f : slot_rule.multiplier;
  // `directions` has stored those of a rule that has one.
  constexpr int kStates = has_direction<Rule> ? 0 : state_count<Rule>;

  // `all`, std::true_type: all threads have eight elements, at aligned addresses.
  const auto update_eight = [&](auto all, int base) {
    constexpr bool kAll = decltype(all)::value;
    const int i = base + int(threadIdx.x) * kPack, n = kAll ? kPack : chunk.size - i;
    const int64_t at = chunk.begin + i;
    const View<Rule, Layout> from = slot.again();
    const bool whole = kAll || (from.wide && has_eight(n));
    Held<kSourceFormats<Rule>> grad;
    Held<kMasterFormats> master;
    [[maybe_unused]] Held<kFormatsOfState<Rule, 0>> first;
    [[maybe_unused]] Held<kFormatsOfState<Rule, 1>> second;
    [[maybe_unused]] Held<kFormatsOfState<Rule, 2>> third;
    const auto read = [&](bool at_once) {
      grad.read(source_of(from), at, n, at_once);
      master.read(from.master, at, n, at_once);
      if constexpr (kStates > 0) first.read(from.state[0], at, n, at_once);
      if constexpr (kStates > 1) second.read(from.state[1], at, n, at_once);
      if constexpr (kStates > 2) third.read(from.state[2], at, n, at_once);
    };
    if (whole) {  // one branch for all arrays, or each array's loads wait for those before
      read(true);
    } else {
      read(false);
    }
    float g[kPack], w[kPack];
    [[maybe_unused]] float s0[kPack], s1[kPack], s2[kPack];
    grad.decode(source_of(from).format, g);
    master.decode(from.master.format, w);
    if constexpr (kStates > 0) first.decode(from.state[0].format, s0);
    if constexpr (kStates > 1) second.decode(from.state[1].format, s1);
    if constexpr (kStates > 2) third.decode(from.state[2].format, s2);
    if constexpr (has_direction<Rule>) update(rule.step, multiplier, g, w);
    if constexpr (kStates == 0 && !has_direction<Rule>) update(rule, multiplier, g, w);
    if constexpr (kStates == 1) update(rule, multiplier, g, w, s0);
    if constexpr (kStates == 2) update(rule, multiplier, g, w, s0, s1);
    if constexpr (kStates == 3) update(rule, multiplier, g, w, s0, s1, s2);
    const View<Rule, Layout> to = slot.again();
    const Randomness bytes = Layout == kAnyTag ? to.randomness() : randomness;
    store_history<kMasterFormats>(to.master, w, at, n, whole,
                                  to.draws_weights() ? bytes.eight(true, at) : 0);
    if (to.has_copy) store_history<kGradFormats>(to.copy, w, at, n, whole);
    if constexpr (!needs_update_norm<Rule>) {  // the moments pass has stored the states
      [[maybe_unused]] const uint64_t random =
          kStates > 0 && to.draws() ? bytes.eight(false, at) : 0;
      if constexpr (kStates > 0)
        store_history<kFormatsOfState<Rule, 0>>(to.state[0], s0, at, n, whole, random);
      if constexpr (kStates > 1)
        store_history<kFormatsOfState<Rule, 1>>(to.state[1], s1, at, n, whole, random);
      if constexpr (kStates > 2)
        store_history<kFormatsOfState<Rule, 2>>(to.state[2], s2, at, n, whole, random);
    }
  };
  // Every thread runs the same number of iterations, because groups exchange numbers between
  // threads.
  for (int base = 0; base < chunk.size; base += kThreads * kPack) {
    if (Layout != kAnyTag && slot.wide && base + kThreads * kPack <= chunk.size) {
      update_eight(std::true_type{}, base);
    } else {
      update_eight(std::false_type{}, base);
    }
  }
}

// Calls apply_chunk with the first layout that is the slot's, or else with none.
template <class Rule>
__device__ __forceinline__ void apply_as(LayoutList<>, uint32_t, const SlotEntry* entries,
                                         const Chunk& chunk, const SlotRule<Rule>* slot_rules) {
  apply_chunk<Rule, kAnyTag>(entries, chunk, slot_rules);
}
template <class Rule, uint32_t Layout, uint32_t... Others>
__device__ __forceinline__ void apply_as(LayoutList<Layout, Others...>, uint32_t tag,
                                         const SlotEntry* entries, const Chunk& chunk,
                                         const SlotRule<Rule>* slot_rules) {
  if (is_layout(Layout, tag, kArrays<Rule>))
    return apply_chunk<Rule, Layout>(entries, chunk, slot_rules);
  apply_as<Rule>(LayoutList<Others...>{}, tag, entries, chunk, slot_rules);
}

template <class Rule>
__global__ void __launch_bounds__(kThreads, kBlocks)
    apply_kernel(const StepList __grid_constant__ table, const Verdict* __restrict__ verdict,
                 const SlotRule<Rule>* __restrict__ slot_rules, StepReportBuffer report) {
  if (int(blockIdx.x) < table.first_block) {
    if (threadIdx.x == 0) write_report(report, *verdict, report.counts->next_scale);
    return;
  }
  const double found_inf = verdict->found_inf;  // arrives while the chunk is looked for
  const Chunk chunk = find_chunk(table);
  if (found_inf != 0) return;
  apply_as(typename LayoutsOf<Rule>::type{}, table.entries[chunk.slot].tag, table.entries, chunk,
           slot_rules);
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
  if constexpr (has_direction<Rule>) {
    if (const char* error = directions<Rule>(plan, table, verdict, slot_rules, stream))
      return error;
    if (norms.gather) norms.gather(norms.context);
  }
  if (blocks == 0) return nullptr;
  return message(launch(
      apply_kernel<Rule>, list.first_block + blocks, kThreads, static_cast<cudaStream_t>(stream),
      list, static_cast<const Verdict*>(verdict), static_cast<const SlotRule<Rule>*>(slot_rules),
      has_report ? inputs->report_buffer : StepReportBuffer{}));
}

AMP_MP_FOR_EACH_RULE(AMP_MP_INSTANTIATE_APPLY)

}  // namespace amp_mp::cuda
