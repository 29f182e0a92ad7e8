#pragma once
// The operations of an optimizer's step: decide, apply, update the loss scale. An `XTensors` struct
// has the members of plan.h's or core's struct `X` as tensors.
#include <functional>
#include <memory>
#include <optional>

#include "torch/state/rule_table.h"
#include "torch/step/measurement.h"
#include "torch/step/slots.h"
#include "torch/step/step_reports.h"

namespace amp_mp {

// How to update a loss scale (plan.h, ScaleUpdate): either a policy's float64 state, with an
// optional float32 scale_out that follows its scale; or torch's float32 scale and int32 growth
// tracker. Output tensors may be the input tensors; all are on one device.
struct ScaleUpdateTensors {
  std::optional<at::Tensor> policy, policy_out, scale, scale_out, tracker, tracker_out;
  double growth_factor, backoff_factor;
  int64_t growth_interval;
};

// What decides a verdict besides statistics (plan.h, Criteria). scale and found_inf are float32
// tensors of one element on the verdict's device; history is float64 [4], for a limit that has one
// (core/norm_limit.h).
struct CriteriaTensors {
  std::optional<at::Tensor> scale, found_inf;
  double max_norm = 0;
  std::shared_ptr<ScaleUpdateTensors> scale_update;
  std::shared_ptr<StepReports> reports;
  NormLimit limit = {};
  std::optional<at::Tensor> history = {};
};

// Memory for a verdict, float64 [5] (core/decide.h, Verdict).
at::Tensor new_verdict(const at::Device& device);

// A verdict on the device. totals: one tensor of statistics for each device, whose last row is the
// total; empty if nothing was measured.
at::Tensor decide_on(const at::Device& device, const Tensors& totals,
                     const CriteriaTensors& inputs);

// What a step of slots decides by, and what it calls between its two halves.
struct ApplyInputs {
  // Null if the verdict is decided already.
  const CriteriaTensors* decides = nullptr;
  // Rules with norms, and decisions that depend on gradients, need statistics: the result of
  // measure(slots); or `measures`, and the step reads the gradients.
  Measurement* found = nullptr;
  bool measures = false;
  // The masters' statistics; null if the step is to read the masters, for a rule that needs norms.
  Measurement* weights = nullptr;

  using Change = std::function<at::Tensor(const at::Tensor&)>;
  // For LAMB. rows: float64 [n, 9], three statistics of each of n slots' updates (plan.h,
  // NormInputs), zeros for a slot without a gradient. A slot may be a shard; returns the statistics
  // of the whole tensors.
  Change sum_updates = {};
  // For a rule with directions (Muon). directions: bfloat16 [elements of all slots], slot after
  // slot, each in its weight's order in memory, zeros for a slot without a gradient. Returns the
  // updates in the same places, in the same tensor or another.
  Change make_updates = {};
  // Called after make_updates, for NorMuon: changes the updates in place. has_gradient: one for
  // each slot.
  std::function<void(const at::Tensor& updates, const at::Tensor& verdict,
                     const std::vector<bool>& has_gradient)>
      normalise = {};
};

// One step of a rule on every parameter that has a gradient; nothing is written on overflow. While
// a CUDA graph is being captured, every parameter that requires a gradient must have one. A rule
// that needs its update's norm calls `sum_updates`, if there is one, once in every step, also a
// skipped one, because other processes take part; a rule with directions calls `make_updates`, but
// not in a step that is skipped on a CPU. An error in either leaves the moments advanced and the
// weights as they were. Other rules call neither.
void apply_(const RuleInfo& rule, Slots& slots, const std::vector<HyperTensors>& hyper_tensors,
            at::Tensor& verdict, const ApplyInputs& given);

// Updates a scale after a step. found_inf and, for policies that use it, max_abs: float64 of one
// element on the scale's device.
void update_scale_(const ScaleUpdateTensors& update, const at::Tensor& found_inf,
                   const std::optional<at::Tensor>& max_abs, StepReports* reports);

}  // namespace amp_mp
