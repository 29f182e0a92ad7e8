#pragma once
// Optimizer steps of both sides, on lists of all lengths.
#include <optional>

#include "scales.h"
#include "tables.h"

namespace {

void step_on_cpu(const RuleInfo& rule, const std::vector<Slot>& slots,
                 const std::vector<Hyper>& hypers, double multiplier, const NormInputs& norms) {
  std::vector<double> rules(slots.size() * rule.bytes / sizeof(double));
  cpu::apply(rule, slots.data(), int64_t(slots.size()), hypers.data(), multiplier, rules.data(),
             norms, 1);
}

const char* step_on_cuda(const RuleInfo& rule, const std::vector<Slot>& slots,
                         const std::vector<Hyper>& hypers, const Criteria* inputs, Verdict* verdict,
                         const cuda::SpanSums& grads, const cuda::SpanSums& weights,
                         const NormInputs& norms) {
  const cuda::StepPlan plan = plan_of(rule, slots, hypers);
  const bool is_short = cuda::is_short(plan);
  OwnTable own(is_short ? 0 : slots.back().row + 1, is_short ? 0 : slots.back().group + 1);
  if (!is_short) own.write(plan);
  std::vector<double> slot_rules(size_t(own.table.rows) * rule.bytes / sizeof(double));
  return cuda::apply(rule, plan, own.table, inputs, verdict, grads, weights, slot_rules.data(),
                     norms, nullptr);
}

// What a rule is told, with its scratch.
struct NormScratch {
  std::vector<Statistics> spans, updates;
  std::vector<int64_t> first;
  unsigned ticket = 7;
  NormInputs inputs;

  NormScratch(const RuleInfo& rule, const std::vector<Slot>& slots, const Statistics* grads,
              const Statistics* masters) {
    if (rule.needs_norms) {
      inputs.grads = grads;
      inputs.weights = masters;
    }
    if (!rule.needs_update_norm) return;
    int64_t room = 1;
    for (const Slot& s : slots) room += kUpdateSums * ceil_divide(s.size, kSpan);
    spans.assign(room, {7, 7, 7});  // whatever was there
    updates.resize(kUpdateSums * slots.size() + 1);
    first.resize(kUpdateSums * slots.size() + 1);
    inputs.update_spans = spans.data();
    inputs.updates = updates.data();
    inputs.first_span = first.data();
    inputs.ticket = &ticket;
  }
  NormScratch(const NormScratch&) = delete;
};

// Other processes hold three quarters of each sum over an update.
struct Gathering {
  const std::vector<Slot>& slots;
  std::vector<Statistics> rows;
  int calls = 0;
  bool all_zero = true;
  const Statistics* updates;

  Gathering(const std::vector<Slot>& list, NormInputs& inputs)
      : slots(list),
        rows(list.empty() ? 0 : kUpdateSums * (size_t(list.back().row) + 1)),
        updates(inputs.updates) {
    inputs.gather = [](void* self) { return static_cast<Gathering*>(self)->gather(); };
    inputs.context = this;
  }
  Gathering(const Gathering&) = delete;

  const Statistics* gather() {
    ++calls;
    for (size_t k = 0; k < kUpdateSums; ++k)
      for (size_t t = 0; t < slots.size(); ++t) {
        const Statistics& own = updates[k * slots.size() + t];
        all_zero = all_zero && same(own, Statistics{});
        rows[kUpdateSums * size_t(slots[t].row) + k] = {4 * own.sum_squares, 0, 0};
      }
    return rows.data();
  }
};

// One step. `given`: the verdict is made before, as for a second device. `gathers`: the norms of
// the updates are not the whole ones.
void step_both(const RuleInfo& rule, const Shape& shape, bool bad = false, bool given = false,
               bool gathers = false) {
  const Model before(shape, bad, rule.states, squares_of(rule));
  Model wanted = before, found = before;
  const std::vector<Reading> gradients = before.readings(kGrad),
                             masters = rule.needs_norms ? before.readings(kMaster)
                                                        : std::vector<Reading>();
  const std::vector<Statistics> grads = measure_on_cpu(gradients),
                                weights = measure_on_cpu(masters);
  Measuring device_grads(gradients, rule.op), device_weights(masters, rule.op);

  Outside outside;
  const Criteria inputs = outside.criteria_of();
  const Verdict host = decide(&grads.back(), &outside.scale, nullptr, 1.0);
  Verdict verdict = {};
  if (given) {
    cuda::combine(device_grads.sums, nullptr);
    cuda::decide(&device_grads.tensors.back(), inputs, &verdict, nullptr);
    device_grads.sums.spans = nullptr;
  }
  const std::vector<Slot> slots = wanted.slots(), device_slots = found.slots();
  const std::vector<Hyper> hypers = before.hypers();
  NormScratch norms(rule, slots, grads.data(), weights.data()),
      device_norms(rule, slots, device_grads.tensors.data(), device_weights.tensors.data());
  std::optional<Gathering> gathering, device_gathering;
  if (gathers) {
    gathering.emplace(slots, norms.inputs);
    device_gathering.emplace(device_slots, device_norms.inputs);
  }
  if (!bad) step_on_cpu(rule, slots, hypers, host.multiplier, norms.inputs);
  const char* error = step_on_cuda(
      rule, device_slots, hypers, given ? nullptr : &inputs, &verdict, device_grads.sums,
      rule.needs_norms ? device_weights.sums : cuda::SpanSums{}, device_norms.inputs);
  expect(!error, "apply is launched", rule.op, 0);
  expect(!std::memcmp(&host, &verdict, sizeof host), "decide", rule.op, 0);
  expect((verdict.skip != 0) == bad, "overflow is found", rule.op, 0);
  expect(outside.counts.decided == 1, "one decision", rule.op, size_t(outside.counts.decided));
  outside.expect_report(host, bad ? 512 : 2048, rule.op);
  expect(outside.next_scale == (bad ? 512 : 2048) && outside.next_tracker == 0, "scale", rule.op,
         0);
  device_grads.expect_same(grads, rule.op);
  if (rule.needs_norms) device_weights.expect_same(weights, rule.op);
  if (gathers)
    expect(device_gathering->calls == 1 && (!bad || device_gathering->all_zero),
           "updates are gathered", rule.op, size_t(device_gathering->calls));
  size_t moved = 0, may_stay = 0;  // large weights may not move in float32
  for (size_t t = 0; t < slots.size(); ++t) {
    const Tensor& f = found.tensors[t];
    expect(f.same(wanted.tensors[t]), bad ? "a skipped step" : "apply", rule.op, t);
    const StoredArray& master = f.arrays[kMaster];
    if (bad || master.n < 64 || width_of(master.format) != 4) continue;
    ++(master.same(before.tensors[t].arrays[kMaster]) ? may_stay : moved);
  }
  expect(moved >= 3 * may_stay, "apply moves weights", rule.op, may_stay);
  for (size_t t = 0; !bad && t + 1 < norms.updates.size(); ++t)
    expect(same(norms.updates[t], device_norms.updates[t]), "sums over the update", rule.op, t);
  std::printf("%s: %zu tensors, %s\n", rule.op, slots.size(), bad ? "overflow" : "applied");
}

// A state in a format of another kind of states, which the kernels know nothing of.
void refuses_other_kinds(const RuleInfo& rule) {
  Model model({{64}, 1}, false, rule.states, squares_of(rule));
  const Model before = model;
  for (const auto& [state, format] : {std::pair(0, F::log8), std::pair(1, F::m8)}) {
    std::vector<Slot> slots = model.slots();
    slots[0].state[state].format = format;
    Outside outside;
    const Criteria inputs = outside.criteria_of();
    Verdict verdict = {7, 7, 7, 7, 7};
    expect(step_on_cuda(rule, slots, model.hypers(), &inputs, &verdict, {}, {}, {}) &&
               verdict.skip == 7 && model.tensors[0].same(before.tensors[0]),
           "another kind's format is refused", rule.op, size_t(state));
  }
}

// Lists of all lengths at which a launch, of ours or of others, begins or ends, empty tensors
// anywhere.
void lengths_of_lists(const RuleInfo& rule, bool quick) {
  constexpr int few = cuda::kFewWords - 5, many = cuda::kManyWords - 41;  // without the rates
  const std::vector<int> all = {
      0,   1,       2,    cuda::kShortRows, cuda::kShortRows + 1, 31, 32, 33, 1025,
      few, few + 1, many, many + 1};
  for (int count : quick ? std::vector{0, 1, cuda::kShortRows, few + 1, 1200} : all)
    step_both(rule, repeated(kTiny, count, 100), false, count % 2 == 0);
  step_both(rule, repeated({33}, 40, 1));  // more groups than a launch takes
  step_both(rule, {{0, 0, 0}, 1});
  step_both(rule, {{0, 0, 5, 0, 40, 0, 0}, 3});
}

}  // namespace
