// The decisions of a step, made where the tensors are: the host never waits for them.
//
// decide_step runs in every step, one kernel for each rule: it adds the sums that measuring has
// left, decides, and makes each slot's rule. The last thread block to have added its tensors does
// the rest. The two small kernels below it serve callers that decide without an update.
#include "core/decide.h"
#include "cuda/combine.h"
#include "cuda/passes.h"
#include "cuda/step_report.h"
#include "cuda/tensor_table.h"

namespace amp_mp::cuda {
namespace {

constexpr int kMaxGroups = 8;  // param_groups of one launch

// What decide_step has to know of the slots. Groups count from the first slot's.
struct ClockTable {
  static constexpr int kOtherBytes = kMaxGroups * int(sizeof(Hyper)) + 2 * int(sizeof(SpanSums)) +
                                     int(sizeof(DecideInputs)) + int(sizeof(NormInputs)) + 128;
  static constexpr int kCapacity = (kArgumentBytes - kOtherBytes) / (8 + 4 + 1);

  Hyper hyper[kMaxGroups];
  Clock* clock[kCapacity];
  int32_t row[kCapacity];
  uint8_t group[kCapacity];
  int32_t count;
  int64_t first_index;

  // Takes as many slots as fit one launch, from `i` on, and advances `i`.
  void fill(const Slot* slots, int64_t& i, int64_t all, const Hyper* hypers) {
    count = 0;
    first_index = i;
    const int first_group = i < all ? slots[i].group : 0;
    for (; i < all && count < kCapacity && slots[i].group - first_group < kMaxGroups; ++i) {
      const int own = slots[i].group - first_group;
      hyper[own] = hypers[slots[i].group];
      clock[count] = slots[i].clock;
      row[count] = int32_t(slots[i].row);
      group[count] = uint8_t(own);
      ++count;
    }
  }
};

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
__device__ __forceinline__ void make_slot_rule(const ClockTable& table, int t, bool has_ticked,
                                               double multiplier, const NormInputs& inputs,
                                               SlotRule<Rule>* slot_rules) {
  Hyper hyper = table.hyper[table.group[t]];
  read_rate(hyper);
  Clock* clock = table.clock[t];
  if (!has_ticked) clock->tick(hyper);
  const int64_t index = table.first_index + t;
  const Norms norms = norms_of(inputs, table.row[t], index, multiplier);
  const Rule rule = make_rule<Rule>(hyper, *clock, norms);
  slot_rules[index] = {rule, float(hyper.maximize ? -multiplier : multiplier), hyper.seed,
                       clock->step};
}

template <class Rule>
__global__ void __launch_bounds__(kCombineThreads)
    decide_step_kernel(const ClockTable __grid_constant__ table, SpanSums grads, SpanSums weights,
                       DecideInputs inputs, bool decides, bool has_ticked, Verdict* verdict,
                       NormInputs norms, SlotRule<Rule>* slot_rules) {
  __shared__ CombineShared shared;
  if (!combine_lists(grads, weights, shared)) return;
  double next_scale = 0;
  if (decides) {
    if (threadIdx.x == 0)
      next_scale = decide_and_update_scale(grads.tensors ? grads.tensors + grads.count : nullptr,
                                           inputs, verdict);
    __syncthreads();
  }
  if (verdict->found_inf == 0)
    for (int t = threadIdx.x; t < table.count; t += kCombineThreads)
      make_slot_rule(table, t, has_ticked, verdict->multiplier, norms, slot_rules);
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
const char* decide_step(const Slot* slots, int64_t count, const Hyper* hypers,
                        const DecideInputs* inputs, Verdict* verdict, const SpanSums& grads,
                        const SpanSums& weights, SlotRule<Rule>* slot_rules,
                        const NormInputs& norms, bool updates_measured, void* stream) {
  auto& table = table_of_thread<ClockTable>();
  NormInputs known = norms;
  if constexpr (needs_update_norm<Rule>) {
    if (!updates_measured) known.updates = nullptr;
  }
  int64_t i = 0;
  for (bool first = true; first || i < count; first = false) {
    table.fill(slots, i, count, hypers);
    const bool decides = first && inputs;
    const SpanSums none, &one = first ? grads : none, &other = first ? weights : none;
    if (const char* error = message(launch(decide_step_kernel<Rule>, combine_blocks(one, other),
                                           kCombineThreads, static_cast<cudaStream_t>(stream),
                                           table, one, other, decides ? *inputs : DecideInputs{},
                                           decides, updates_measured, verdict, known, slot_rules)))
      return error;
  }
  return nullptr;
}

#define AMP_MP_INSTANTIATE(Rule, op)                                                              \
  template const char* decide_step<Rule>(const Slot*, int64_t, const Hyper*, const DecideInputs*, \
                                         Verdict*, const SpanSums&, const SpanSums&,              \
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
