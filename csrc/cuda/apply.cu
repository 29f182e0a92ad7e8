// One read-modify-write of everything a step touches. A kernel per rule; formats are a tag of the
// slot, the same for a whole block of threads.
#include "cuda/passes.h"
#include "cuda/slots.h"

namespace amp_mp::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 16384;  // elements a block of threads owns; a multiple of kPack * kThreads

__device__ __forceinline__ Norms norms_of(const Measured& measured, int64_t row, int64_t index,
                                          double multiplier) {
  Norms n = {};
  if (measured.grads) n.grad = sqrt(measured.grads[row].sum_squares) * multiplier;
  if (measured.weights) n.weight = sqrt(measured.weights[row].sum_squares);
  if (measured.updates) n.update = sqrt(measured.updates[index].sum_squares);
  return n;
}

// Makes the rules of this step; the first time in a step also advances the clocks.
template <class Rule>
__global__ void __launch_bounds__(kThreads)
    tick_kernel(const SlotTable __grid_constant__ table, const Hypers __grid_constant__ hypers,
                const Verdict* __restrict__ verdict, Measured measured, bool again,
                Rule* __restrict__ rules) {
  if (verdict->found_inf != 0) return;
  for (int t = threadIdx.x; t < table.count; t += kThreads) {
    const Hyper& hyper = hypers.group[group_of(table.tag[t])];
    Clock* clock = static_cast<Clock*>(table.data[kClock][t]);
    if (!again) clock->tick(hyper);
    const int64_t index = table.first_index + t;
    const Norms norms = norms_of(measured, table.place[t].row, index, verdict->multiplier);
    rules[index] = make_rule<Rule>(hyper, *clock, norms);
  }
}

// Two blocks an SM: with launch bounds of 256 alone ptxas aims at 32 registers and splits the
// loads. One where a third state would spill.
template <class Rule>
__global__ void __launch_bounds__(kThreads, Rule::kStates > 2 ? 1 : 2)
    apply_kernel(const SlotTable __grid_constant__ table, const Hypers __grid_constant__ hypers,
                 const Verdict* __restrict__ verdict, const Rule* __restrict__ rules) {
  if (verdict->found_inf != 0) return;
  const Chunk chunk = find_chunk(table, kChunk);
  const View slot(table, hypers, chunk.slot);
  const Rule rule = rules[table.first_index + chunk.slot];
  const float multiplier = float(slot.hyper.maximize ? -verdict->multiplier : verdict->multiplier);
  const bool draws = slot.draws(), draws_weights = is_stochastic(slot.master.format);

  constexpr uint32_t kThird = kOnly<Format::float32>;
  // The loop is the same for all threads: some formats talk to their neighbours.
  for (int base = 0; base < chunk.size; base += kThreads * kPack) {
    const int i = base + int(threadIdx.x) * kPack, left = chunk.size - i;
    const int n = left < 0 ? 0 : left < kPack ? left : kPack;
    const bool whole = slot.wide && n == kPack;
    const int64_t at = chunk.begin + i;
    Held<kGradFormats> grad;
    Held<kMasterFormats> master;
    Held<kStateFormats> first;
    Held<kSquareFormats> second;
    Held<kThird> third;
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
    if (slot.weight.data) store_history<kGradFormats>(slot.weight, w, at, n, whole);
    if constexpr (!needs_update_norm<Rule>) {  // its first pass has stored them
      const uint64_t random = draws ? slot.random(false, at) : 0;
      if constexpr (Rule::kStates > 0)
        store_history<kStateFormats>(slot.state[0], s0, at, n, whole, random);
      if constexpr (Rule::kStates > 1)
        store_history<kSquareFormats>(slot.state[1], s1, at, n, whole, random);
      if constexpr (Rule::kStates > 2)
        store_history<kThird>(slot.state[2], s2, at, n, whole, random);
    }
  }
}

}  // namespace

template <class Rule>
const char* apply(const Slot* slots, int64_t count, const Hyper* hypers, const Verdict* verdict,
                  Rule* rules, const Measured& measured, void* stream) {
  static thread_local SlotTable table;
  const auto queue = static_cast<cudaStream_t>(stream);
  Hypers local;
  const auto tick = [&](const Measured& known, bool again) -> const char* {
    return message(
        launch(tick_kernel<Rule>, 1, kThreads, queue, table, local, verdict, known, again, rules));
  };
  if constexpr (needs_update_norm<Rule>) {
    Measured before = measured;
    before.updates = nullptr;
    for (int64_t i = 0; i < count;) {
      take(table, local, slots, i, count, hypers, kChunk, 0);
      if (const char* error = tick(before, false)) return error;
    }
    if (const char* error = prepare(slots, count, hypers, verdict, static_cast<const Rule*>(rules),
                                    measured, stream))
      return error;
  }
  for (int64_t i = 0; i < count;) {
    take(table, local, slots, i, count, hypers, kChunk, 0);
    const char* error = tick(measured, needs_update_norm<Rule>);
    if (!error && table.blocks() > 0)
      error = message(launch(apply_kernel<Rule>, table.blocks(), kThreads, queue, table, local,
                             verdict, static_cast<const Rule*>(rules)));
    if (error) return error;
  }
  return nullptr;
}

#define AMP_MP_INSTANTIATE(Rule, op)                                                          \
  template const char* apply<Rule>(const Slot*, int64_t, const Hyper*, const Verdict*, Rule*, \
                                   const Measured&, void*);
AMP_MP_FOR_EACH_RULE(AMP_MP_INSTANTIATE)

}  // namespace amp_mp::cuda
