// The decisions of a step, made where the tensors are: the host never waits for them.
//
// decide_step runs in every step, one kernel for each rule: it adds the sums that measuring has
// left, decides, and makes each slot's rule. The last thread block to have added its tensors does
// the rest. The two small kernels below it serve callers that decide without an update.
#include "core/decide.h"
#include "cuda/combine.h"
#include "cuda/step_arguments.h"
#include "cuda/step_report.h"

namespace amp_mp::cuda {
namespace {

__device__ __forceinline__ Norms norms_of(const NormInputs& inputs, int64_t row, int64_t index,
                                          double multiplier) {
  Norms n = {};
  if (inputs.grads) n.grad = sqrt(inputs.grads[row].sum_squares) * multiplier;
  if (inputs.weights) n.weight = sqrt(inputs.weights[row].sum_squares);
  if (inputs.gathered) {
    n.update = sqrt(inputs.gathered[row].sum_squares);
  } else if (inputs.updates) {
    n.update = sqrt(inputs.updates[index].sum_squares);
  }
  return n;
}

// Ticks a slot's clock, once a step, and makes its rule.
template <class Rule>
__device__ __forceinline__ void make_slot_rule(const StepInput& input, int index, bool has_ticked,
                                               double multiplier, const NormInputs& inputs,
                                               SlotRule<Rule>* slot_rules) {
  Hyper hyper = input.hyper;
  read_rate(hyper);
  if (!has_ticked) input.clock->tick(hyper);
  const Norms norms = norms_of(inputs, input.row, index, multiplier);
  const Rule rule = make_rule<Rule>(hyper, *input.clock, norms);
  slot_rules[input.slot] = {rule, float(hyper.maximize ? -multiplier : multiplier), hyper.seed,
                            input.clock->step, input.grad};
}

template <class Rule, class Plan>
__global__ void __launch_bounds__(kCombineThreads)
    decide_step_kernel(const Plan __grid_constant__ plan, SpanSums grads, SpanSums weights,
                       DecideInputs inputs, bool decides, bool has_ticked, Verdict* verdict,
                       NormInputs norms, SlotRule<Rule>* slot_rules) {
  __shared__ CombineShared shared;
  if (!combine_lists(grads, weights, shared)) return;
  plan.write();
  double next_scale = 0;
  if (decides) {
    if (threadIdx.x == 0)
      next_scale = decide_and_update_scale(grads.tensors ? grads.tensors + grads.count : nullptr,
                                           inputs, verdict);
    __syncthreads();
  }
  if (verdict->found_inf == 0)
    for (int t = threadIdx.x; t < plan.count; t += kCombineThreads)
      make_slot_rule(plan.at(t), t, has_ticked, verdict->multiplier, norms, slot_rules);
  // Last: a write to the host's memory takes longer than all the rest.
  if (decides && threadIdx.x == 0) write_report(inputs.report_buffer, *verdict, next_scale);
}

__global__ void decide_kernel(const Statistics* total, DecideInputs inputs, Verdict* verdict) {
  if (threadIdx.x != 0) return;
  const double next_scale = decide_and_update_scale(total, inputs, verdict);
  write_report(inputs.report_buffer, *verdict, next_scale);
}

__global__ void update_scale_kernel(ScaleUpdate update, const double* found_inf,
                                    const double* max_abs, StepReportBuffer report_buffer) {
  if (threadIdx.x != 0) return;
  const bool found = *found_inf != 0;
  const double largest = max_abs ? *max_abs : 0, scale = update_loss_scale(update, found, largest);
  write_report(report_buffer, {double(found), 1, 0, largest, scale}, scale);
}

}  // namespace

template <class Rule>
const char* decide_step(const StepPlan& plan, const StepTable& table, const DecideInputs* inputs,
                        Verdict* verdict, const SpanSums& grads, const SpanSums& weights,
                        SlotRule<Rule>* slot_rules, const NormInputs& norms, bool updates_measured,
                        void* stream) {
  NormInputs known = norms;
  if constexpr (needs_update_norm<Rule>) {
    if (!updates_measured) known.updates = nullptr;
  }
  const auto launch_with = [&]<class Plan>(Plan& arguments) {
    arguments.fill(plan, table);
    return message(launch(decide_step_kernel<Rule, Plan>, combine_blocks(grads, weights),
                          kCombineThreads, static_cast<cudaStream_t>(stream), arguments, grads,
                          weights, inputs ? *inputs : DecideInputs{}, inputs != nullptr,
                          updates_measured, verdict, known, slot_rules));
  };
  if (!table.mirror) return launch_with(table_of_thread<ShortPlan>());
  const int64_t words = table.groups + plan.count;
  if (words <= kFewWords) return launch_with(table_of_thread<LongPlan<kFewWords>>());
  return launch_with(table_of_thread<LongPlan<kManyWords>>());
}

#define AMP_MP_INSTANTIATE(Rule, op)                                                             \
  template const char* decide_step<Rule>(const StepPlan&, const StepTable&, const DecideInputs*, \
                                         Verdict*, const SpanSums&, const SpanSums&,             \
                                         SlotRule<Rule>*, const NormInputs&, bool, void*);
AMP_MP_FOR_EACH_RULE(AMP_MP_INSTANTIATE)

const char* decide(const Statistics* total, const DecideInputs& inputs, Verdict* verdict,
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
