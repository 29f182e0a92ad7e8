// The beginning of a step, a kernel per rule: adds what measuring has left, decides, and makes each
// slot's rule, all where the tensors are. The last block to have added its tensors does the rest.
#include "cuda/combine.h"
#include "cuda/passes.h"
#include "cuda/ring.h"
#include "cuda/table.h"

namespace amp_mp::cuda {
namespace {

constexpr int kMaxGroups = 8;  // param_groups of one launch

// What a step has to know of slots before it touches their tensors. Groups count from the first
// slot's.
struct ClockTable {
  static constexpr int kOther = kMaxGroups * int(sizeof(Hyper)) + 2 * int(sizeof(Parts)) +
                                int(sizeof(Decision)) + int(sizeof(Measured)) + 128;
  static constexpr int kCapacity = (kArgumentBytes - kOther) / (8 + 4 + 1);

  Hyper hyper[kMaxGroups];
  Clock* clock[kCapacity];
  int32_t row[kCapacity];
  uint8_t group[kCapacity];
  int32_t count;
  int64_t first_index;

  void take(const Slot* slots, int64_t& i, int64_t all, const Hyper* hypers) {
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

__device__ __forceinline__ Norms norms_of(const Measured& measured, int64_t row, int64_t index,
                                          double multiplier) {
  Norms n = {};
  if (measured.grads) n.grad = sqrt(measured.grads[row].sum_squares) * multiplier;
  if (measured.weights) n.weight = sqrt(measured.weights[row].sum_squares);
  if (measured.updates) n.update = sqrt(measured.updates[index].sum_squares);
  return n;
}

// Ticks a slot's clock, unless that has been done, and makes its rule.
template <class Rule>
__device__ __forceinline__ void make_ready(const ClockTable& table, int t, bool again,
                                           double multiplier, const Measured& measured,
                                           Ready<Rule>* ready) {
  Hyper hyper = table.hyper[table.group[t]];
  read_rate(hyper);
  Clock* clock = table.clock[t];
  if (!again) clock->tick(hyper);
  const int64_t index = table.first_index + t;
  const Norms norms = norms_of(measured, table.row[t], index, multiplier);
  const Rule rule = make_rule<Rule>(hyper, *clock, norms);
  ready[index] = {rule, float(hyper.maximize ? -multiplier : multiplier), hyper.seed, clock->step};
}

template <class Rule>
__global__ void __launch_bounds__(kCombineThreads)
    begin_kernel(const ClockTable __grid_constant__ table, Parts grads, Parts weights,
                 Decision decision, bool decides, bool again, Verdict* verdict, Measured measured,
                 Ready<Rule>* ready) {
  __shared__ CombineShared shared;
  if (!combine_lists(grads, weights, shared)) return;
  double next_scale = 0;
  if (decides) {
    if (threadIdx.x == 0)
      next_scale = settle(grads.tensors ? grads.tensors + grads.count : nullptr, decision, verdict);
    __syncthreads();
  }
  if (verdict->found_inf == 0)
    for (int t = threadIdx.x; t < table.count; t += kCombineThreads)
      make_ready(table, t, again, verdict->multiplier, measured, ready);
  // Last: a write to the host's memory takes longer than all the rest.
  if (decides && threadIdx.x == 0) publish(decision.ring, *verdict, next_scale);
}

}  // namespace

template <class Rule>
const char* begin(const Slot* slots, int64_t count, const Hyper* hypers, const Decision* decision,
                  Verdict* verdict, const Parts& grads, const Parts& weights, Ready<Rule>* ready,
                  const Measured& measured, bool again, void* stream) {
  auto& table = table_of_thread<ClockTable>();
  int64_t i = 0;
  for (bool first = true; first || i < count; first = false) {
    table.take(slots, i, count, hypers);
    const bool decides = first && decision;
    const Parts none, &own = first ? grads : none, &other = first ? weights : none;
    const int64_t blocks = combine_blocks(own, other);
    Measured known = measured;
    if constexpr (needs_update_norm<Rule>) {
      if (!again) known.updates = nullptr;
    }
    if (const char* error = message(launch(
            begin_kernel<Rule>, blocks, kCombineThreads, static_cast<cudaStream_t>(stream), table,
            own, other, decides ? *decision : Decision{}, decides, again, verdict, known, ready)))
      return error;
  }
  return nullptr;
}

#define AMP_MP_INSTANTIATE(Rule, op)                                                              \
  template const char* begin<Rule>(const Slot*, int64_t, const Hyper*, const Decision*, Verdict*, \
                                   const Parts&, const Parts&, Ready<Rule>*, const Measured&,     \
                                   bool, void*);
AMP_MP_FOR_EACH_RULE(AMP_MP_INSTANTIATE)

}  // namespace amp_mp::cuda
