#pragma once
// Steps as a CUDA graph replays them.
#include "stepping.h"

namespace {

// What a CUDA graph replays: one list of pointers for all steps, while gradients, rate, decay
// and scale change where they are. Against a host that does each step anew.
void replays(const RuleInfo& rule, const char* name, std::vector<double> policy, int steps) {
  Model host_model({kEdges, 5}, false, rule.states, squares_of(rule)), device_model = host_model;
  const std::vector<Slot> slots = host_model.slots(), device_slots = device_model.slots();
  const std::vector<Reading> readings = device_model.readings(kGrad);
  std::vector<Hyper> hypers = host_model.hypers(), device_hypers = hypers;
  float rate = 0;
  double decay = 0;
  for (Hyper& h : device_hypers) {
    h.lr = h.weight_decay = 1e30;
    h.lr_at = &rate;
    h.weight_decay_at = &decay;
    h.weight_decay_is_double = true;
  }
  std::vector<double> device_policy = policy;
  Outside outside;
  outside.scale = float(policy[1]);
  Criteria inputs = outside.criteria_of();
  inputs.scale_update = in_place(device_policy, outside.scale);
  int skipped = 0;
  for (int step = 0; step < steps; ++step) {
    rate = 1e-3f / float(1 + step);
    decay = .1 / (1 + step);
    for (Hyper& h : hypers) h.lr = double(rate), h.weight_decay = decay;
    const bool bad = step % 7 == 3;
    const float scale = outside.scale;
    for (Model* model : {&host_model, &device_model})
      for (size_t t = 0; t < model->tensors.size(); ++t) {
        StoredArray& g = model->tensors[t].arrays[kGrad];
        std::vector<float> x = numbers(g.n, 13 * t + 5 * size_t(step), 1e-3f * scale);
        if (bad && t == size_t(step) % 13 && !x.empty()) x.back() = HUGE_VALF;
        g.fill(x, false);
      }
    const std::vector<Statistics> grads = measure_on_cpu(readings);
    const Verdict verdict = decide(&grads.back(), &scale, nullptr, 1.0);
    if (verdict.skip == 0) step_on_cpu(rule, slots, hypers, verdict.multiplier, NormInputs{});
    skipped += verdict.skip != 0;
    update_scale_state(policy.data(), verdict.skip != 0, verdict.max_abs);

    Measuring measuring(readings, name);
    Verdict found = {};
    step_on_cuda(rule, device_slots, device_hypers, &inputs, &found, measuring.sums,
                 cuda::SpanSums{}, NormInputs{});
    expect(!std::memcmp(&verdict, &found, sizeof found), "a replayed verdict", name, size_t(step));
    expect(device_policy == policy && outside.scale == float(policy[1]), "a replayed scale", name,
           size_t(step));
    outside.expect_report(verdict, float(policy[1]), name);
    for (size_t t = 0; t < slots.size(); ++t)
      expect(device_model.tensors[t].same(host_model.tensors[t]), "a replayed step", name, t);
  }
  expect(skipped >= steps / 8 && skipped < steps / 2, "some steps overflow", name, size_t(skipped));
  expect(outside.counts.decided == uint64_t(steps), "steps are counted", name,
         size_t(outside.counts.decided));
  std::printf("%s, %s: %d steps, %d skipped\n", rule.op, name, steps, skipped);
}

}  // namespace
