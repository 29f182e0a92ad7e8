// The decisions of a step, made where the tensors are: the host never waits for them.
//
// decide_step runs in every step: it adds up the sums that measuring has written, decides, and
// makes each slot's rule. The last thread block to have added its tensors does the rest. The two
// small kernels below it serve callers that decide without an update.
#include "core/rules.h"
#include "cuda/combine.h"
#include "cuda/deciding.h"
#include "cuda/made_rules.h"
#include "cuda/slot_inputs.h"
#include "cuda/step_report.h"

namespace amp_mp::cuda {
namespace {

// Of the slot in a row, which is number `index` of `count`.
__device__ __forceinline__ Norms norms_of(const NormInputs& inputs, int64_t row, int64_t index,
                                          int64_t count, double multiplier) {
  Norms n = {};
  if (inputs.grads) n.grad = sqrt(inputs.grads[row].sum_squares) * multiplier;
  if (inputs.weights) n.weight = sqrt(inputs.weights[row].sum_squares);
  if (!inputs.gathered && !inputs.updates) return n;
  const Statistics* const sums =
      inputs.gathered ? inputs.gathered + kUpdateSums * row : inputs.updates + index;
  const int64_t stride = inputs.gathered ? 1 : count;
  n.update = sqrt(sums[0].sum_squares);
  n.along = sums[stride].sum_squares;
  n.weight = sqrt(sums[2 * stride].sum_squares);
  return n;
}

// RuleInfo::index of each rule, by its operator's name. One kernel makes all rules: a kernel for
// each would be as long, because rules take the least part of it.
#define AMP_MP_NAME(Rule, op) op,
enum class RuleIndex { AMP_MP_FOR_EACH_RULE(AMP_MP_NAME) };
#undef AMP_MP_NAME

// Ticks a slot's clock, once a step, and makes its rule.
template <class Rule>
__device__ __forceinline__ SlotRule<Rule> make_slot_rule(const Hyper& hyper, Clock& clock,
                                                         bool has_ticked, double multiplier,
                                                         const Norms& norms) {
  if (!has_ticked) clock.tick(hyper);
  return {make_rule<Rule>(hyper, clock, norms), float(hyper.maximize ? -multiplier : multiplier),
          hyper.seed, clock.step, nullptr};
}

// The rules of this pass's slots: first the leaders make theirs, then the others copy them. A rule
// that needs a tensor's norms has no leaders, and a short plan neither: its slots are one warp,
// which takes as long as one slot.
template <class Rule, class Plan>
__device__ __forceinline__ void make_rules(const Plan& plan, int first,
                                           const Inputs<Plan::kAtOnce>& known, bool has_ticked,
                                           double multiplier, const NormInputs& norms,
                                           MadeRules& made, void* slot_rules) {
  constexpr bool kLead = Plan::kAtOnce > 1 && !is_layerwise<Rule>;
  if constexpr (kLead) {
    made.clear();
    for (int k = 0; k < Plan::kAtOnce; ++k)
      if (const int t = first + k * kCombineThreads; t < plan.count)
        made.stand(known.input[k].slot.group, known.input[k].clock, t);
    __syncthreads();  // the leaders are chosen
  }
  // Side by side, two rules take 60 registers more.
  AMP_MP_NO_UNROLL for (int i = kLead ? 0 : Plan::kAtOnce; i < 2 * Plan::kAtOnce; ++i) {
    const bool is_others_turn = i >= Plan::kAtOnce;
    const int k = i % Plan::kAtOnce, t = first + k * kCombineThreads;
    const Input mine = known.at(k);
    const int group = mine.slot.group;
    if (kLead && i == Plan::kAtOnce) __syncthreads();  // the leaders' rules are there
    if (t >= plan.count) continue;
    const bool leads = kLead && made.leads(group, mine.clock, t);
    if (leads == is_others_turn) continue;
    Clock clock = mine.clock;
    SlotRule<Rule> found;
    if (!kLead || !made.copy(group, clock, found)) {
      Hyper hyper = plan.hyper_of(group);
      hyper.lr = mine.rate;
      read_decay(hyper);
      found = make_slot_rule<Rule>(hyper, clock, has_ticked, multiplier,
                                   norms_of(norms, mine.slot.row, t, plan.count, multiplier));
    }
    if (leads) made.keep(group, mine.clock, clock, found);
    *mine.slot.clock = clock;
    found.grad = plan.grad_of(t);
    static_cast<SlotRule<Rule>*>(slot_rules)[mine.slot.slot] = found;
  }
}

// A long plan keeps two slots in registers: left to itself the compiler would spill some.
template <class Plan>
__global__ void __launch_bounds__(kCombineThreads, Plan::kAtOnce > 1 ? 1 : 3)
    decide_step_kernel(const Plan __grid_constant__ plan, SpanSums grads, SpanSums weights,
                       Criteria inputs, bool decides, bool reports, bool has_ticked,
                       Verdict* verdict, NormInputs norms, RuleIndex rule, void* slot_rules) {
  __shared__ CombineShared shared;
  __shared__ DecideShared decided;
  __shared__ MadeRules made;
  if (!combine_lists(grads, weights, shared)) return;
  plan.write();
  Inputs<Plan::kAtOnce> known;
  if (plan.count > 0) known.read(plan, int(threadIdx.x));
  Decision decision(inputs, decided);
  if (grads.spans) {
    const Statistics total = combine_total(grads, shared);
    if (threadIdx.x == 0) decided.total = total;
  } else if (decides && grads.tensors && threadIdx.x == 0) {
    decided.total = grads.tensors[grads.count];
  }
  if (weights.spans) combine_total(weights, shared);
  double next_scale = 0;
  if (decides) {
    next_scale = decision.make(grads.tensors != nullptr, verdict);
  } else {
    if (threadIdx.x == 0) decided.verdict = *verdict;
    __syncthreads();
  }
  const double multiplier = decided.verdict.multiplier;
  constexpr int kStep = Plan::kAtOnce * kCombineThreads;
  for (int base = 0; decided.verdict.skip == 0 && base < plan.count; base += kStep) {
    const int first = base + int(threadIdx.x);
    if (first >= kStep && first < plan.count) known.read(plan, first);
    switch (rule) {
#define AMP_MP_CASE(Rule, op)                                                              \
  case RuleIndex::op:                                                                      \
    make_rules<Rule>(plan, first, known, has_ticked, multiplier, norms, made, slot_rules); \
    break;
      AMP_MP_FOR_EACH_RULE(AMP_MP_CASE)
#undef AMP_MP_CASE
    }
  }
  if (!decides || threadIdx.x != 0 || !inputs.report_buffer.reports) return;
  if (reports) {
    write_report(inputs.report_buffer, decided.verdict, next_scale);
  } else {
    inputs.report_buffer.counts->next_scale = next_scale;
  }
}

__global__ void __launch_bounds__(32)
    decide_kernel(const Statistics* total, Criteria inputs, Verdict* verdict) {
  __shared__ DecideShared decided;
  Decision decision(inputs, decided);
  if (total && threadIdx.x == 0) decided.total = *total;
  const double next_scale = decision.make(total != nullptr, verdict);
  if (threadIdx.x == 0) write_report(inputs.report_buffer, decided.verdict, next_scale);
}

__global__ void update_scale_kernel(ScaleUpdate update, const double* found_inf,
                                    const double* max_abs, StepReportBuffer report_buffer) {
  if (threadIdx.x != 0) return;
  const bool found = *found_inf != 0;
  const double largest = max_abs ? *max_abs : 0, scale = update_loss_scale(update, found, largest);
  write_report(report_buffer, {double(found), 1, 0, largest, scale}, scale);
}

}  // namespace

const char* decide_step(const RuleInfo& rule, const StepPlan& plan, const StepTable& table,
                        const Criteria* inputs, Verdict* verdict, const SpanSums& grads,
                        const SpanSums& weights, void* slot_rules, const NormInputs& norms,
                        bool updates_measured, bool reports, void* stream) {
  NormInputs known = norms;
  if (rule.needs_update_norm && !updates_measured) known.updates = nullptr;
  const auto launch_with = [&]<class Plan>(Plan& arguments) {
    arguments.fill(plan, table);
    return message(launch(decide_step_kernel<Plan>, combine_blocks(grads, weights), kCombineThreads,
                          static_cast<cudaStream_t>(stream), arguments, grads, weights,
                          inputs ? *inputs : Criteria{}, inputs != nullptr, reports,
                          updates_measured, verdict, known, RuleIndex(rule.index), slot_rules));
  };
  if (!table.mirror) return launch_with(table_of_thread<ShortPlan>());
  const int64_t words = table.groups + plan.count;
  if (words <= kFewWords) return launch_with(table_of_thread<LongPlan<kFewWords>>());
  return launch_with(table_of_thread<LongPlan<kManyWords>>());
}

const char* decide(const Statistics* total, const Criteria& inputs, Verdict* verdict,
                   void* stream) {
  return message(
      launch(decide_kernel, 1, 32, static_cast<cudaStream_t>(stream), total, inputs, verdict));
}

const char* update_scale(const ScaleUpdate& update, const double* found_inf, const double* max_abs,
                         const StepReportBuffer& report_buffer, void* stream) {
  return message(launch(update_scale_kernel, 1, 32, static_cast<cudaStream_t>(stream), update,
                        found_inf, max_abs, report_buffer));
}

}  // namespace amp_mp::cuda
