#pragma once
// An optimizer's step: Python asks whether the gathered tensors are still the optimizer's, has them
// gathered again where they are not, and calls `step`, which measures, decides and applies
// (optim/step/stepper.py).
#include <array>

#include "torch/step/gathered.h"
#include "torch/step/step.h"

namespace amp_mp {

// A KeyboardInterrupt from a callback, or another BaseException that is no Exception.
using Interrupt = std::optional<py::error_already_set>;

// Statistics of an optimizer's gradients, bucket by bucket, read before the step that uses them.
struct Measured {
  std::shared_ptr<Gathered> of;
  Measurements found;    // one besides where this process has no bucket, and others have
  Measurements weights;  // statistics of the masters, where shards need them
  // By device, float64 [3]: sum of squares, largest finite |g|, number of inf and NaN.
  py::dict totals() const;
};

// What a loss scaler passes to a step.
struct StepInputs {
  // The loss scale that the gradients carry, a number or a tensor of one element; None is 1.
  py::object scale = py::none();
  // The scaler's own verdict, not 0 to skip the step; None if the step decides.
  py::object found_inf = py::none();
  // Read the gradients for the verdict even if the optimizer needs no statistics.
  bool measure = false;

  // Statistics that the scaler has read; the step then does not read the gradients for them.
  std::shared_ptr<Measured> measured;
  // Clip to this norm instead of the optimizer's max_grad_norm; 0 or none: to the optimizer's.
  std::optional<double> max_norm;
  // Move the loss scale by the step's verdict, if all parameters are on the scale's device.
  std::shared_ptr<ScaleUpdateTensors> scale_update;
};

// The decisions of an optimizer's steps. On CUDA the device writes them to host memory
// (step_reports.h): a report that has arrived costs nothing to read, and replays are reported too.
class StepLog {
 public:
  void forget() { verdict_.reset(); }
  at::Tensor verdict_on(const at::Device& device);  // the same memory at every step
  std::shared_ptr<StepReports> reports_on(const at::Device& device);
  // Decides by statistics of several devices, at a scale, and counts it as a step.
  at::Tensor decide(const at::Device& device, const Tensors& totals, const py::object& scale);
  void add(const at::Tensor& verdict, bool measured, bool scale_updated = false);
  // (number, skipped, norm, max_abs, scale, overflows, spikes) of the last step, or of the last
  // that has reached the host; norm and max_abs are None if nothing was measured. overflows and
  // spikes count the steps skipped so far. None before the first step.
  py::object newest(bool wait) const;
  // (number, steps skipped in a row, scale, norm, whether the norm was too large) if the newest
  // step on the host was skipped, else None; never waits.
  py::object skipped() const;
  // Whether the last step has moved the loss scale (StepInputs::scale_update).
  bool scale_updated() const { return scale_updated_; }
  // The norms so far, as core/norm_limit.h's NormHistory: on the device of the steps; and as
  // numbers, None if no step has needed it, which waits for the device.
  at::Tensor history_on(const at::Device& device);
  py::object norm_history() const;
  void set_norm_history(const std::optional<std::array<double, 4>>& numbers);
  const at::Tensor& verdict() const { return verdict_; }
  int64_t count() const { return count_; }
  const std::shared_ptr<StepReports>& reports() const { return reports_; }

 private:
  // The report of the last step, or of the last that has reached the host. There must be a step.
  std::optional<StepReport> report(bool wait) const;

  at::Tensor verdict_, memory_;
  std::shared_ptr<StepReports> reports_;
  at::Tensor history_;
  StepCounts counts_ = {};  // of steps on a CPU
  int64_t count_ = 0;
  bool measured_ = false, scale_updated_ = false;
};

// The steps of one optimizer. Each call releases the GIL, and only one may be under way: Python's
// Stepper has the lock.
class Steps {
 public:
  // Drops the last step's report. Call it before the gathered tensors are let go: it warns where a
  // CUDA graph has captured them.
  void forget();
  // Whether a CUDA graph has captured a step of the present tensors.
  bool is_captured() const { return captured_; }
  py::object norm_history() const { return log_.norm_history(); }
  void set_norm_history(const std::optional<std::array<double, 4>>& numbers);
  // An optimizer's tensors, checked, with the state that was missing.
  std::shared_ptr<Gathered> gather(const Layouts& rules, const py::list& groups,
                                   const py::dict& states, const GroupInfo& info);
  // One step. Returns StepLog::skipped. checks: whether the optimizer needs statistics, for its
  // overflow check or a norm. max_norm: its max_grad_norm. limit: its skip_norm_above; the history
  // of a NormSpike is in the log.
  py::object step(const std::shared_ptr<Gathered>& gathered, const py::list& groups,
                  const StepInputs& given, bool checks, std::optional<double> max_norm,
                  const std::optional<NormLimit>& limit);
  // Reads the gradients, for a step that gets the result in its inputs.
  std::shared_ptr<Measured> measure(const std::shared_ptr<Gathered>& gathered);
  StepLog& log() { return log_; }

 private:
  void warn_of_graph();

  bool captured_ = false;
  int64_t moves_ = 0;  // how often the buckets' tensors had moved up to the last step
  StepLog log_;
};

// A scaler's number as a float32 tensor of one element on the device; none for None.
std::optional<at::Tensor> scalar_on(const at::Device& device, const py::object& number);

// One step of the rule of a bucket; releases the GIL. `given` has no callbacks yet. sum_updates:
// the function of ApplyInputs, or None. interrupt: gets an interrupt that comes while Python makes
// updates, so that the step ends before it is raised; null to raise it at once.
void apply_bucket(Bucket& bucket, const std::vector<HyperTensors>& hypers, at::Tensor& verdict,
                  ApplyInputs given, const py::object& sum_updates, Interrupt* interrupt);

}  // namespace amp_mp
