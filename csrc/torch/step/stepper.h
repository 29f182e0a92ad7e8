#pragma once
// The one door of an optimizer's step: gathers its tensors, then measures, decides and applies.
// Python gives it the param_groups and the state as they are, and does the collectives of shards.
#include <array>
#include <mutex>

#include "torch/step/gathered.h"
#include "torch/step/step.h"

namespace amp_mp {

// What Python raises in the middle of a step that is no Exception.
using Interrupt = std::optional<py::error_already_set>;
using Measurements = std::vector<std::shared_ptr<Measurement>>;

// Statistics of an optimizer's gradients, bucket by bucket, read before the step that uses them.
struct Measured {
  std::shared_ptr<Gathered> of;
  Measurements found;
  Measurements weights;  // of the masters, where shards need them
  // By device, float64 [3]: sum of squares, largest finite |g|, number of inf and NaN.
  py::dict totals() const;
};

// What a step is given besides param_groups and state. A loss scaler or a wrapper makes it, without
// one the step itself.
struct StepInputs {
  // The loss scale that the gradients carry, a number or a tensor of one element; None is 1.
  py::object scale = py::none();
  // Another's verdict, not 0 to skip the step; None where the step itself decides.
  py::object found_inf = py::none();
  // Read the gradients for the verdict even if the optimizer itself needs no statistics.
  bool measure = false;
  // Whether it is from a torch.amp.GradScaler, which does not know all processes.
  bool from_stock = false;
  // Whether gradients carry the scale after the step, too, as those of FP16_Optimizer.
  bool keeps = false;

  // Statistics that were read already; the step then reads the gradients only once.
  std::shared_ptr<Measured> measured;
  // Clip to this norm instead of the optimizer's max_grad_norm.
  std::optional<double> max_norm;
  // Where the loss scale goes next: scale_updated below.
  std::shared_ptr<ScaleUpdateTensors> scale_update;
  // What the step sets: scale_updated, that it has applied scale_update, as it does where all
  // parameters are on one device; used, that a step has used the inputs, where a scaled loss has
  // left them for the steps that follow (optim/step/ledger.py).
  bool scale_updated = false, used = false;
  // What the optimizer asks of every step: whether it measures, its max_grad_norm, skip_norm_above:
  // a norm, or sigmas and window of a NormSpike, whose history is the log's; 0 for none.
  bool checks = false;
  std::optional<double> own_max_norm;
  double norm_limit = 0;
  std::pair<double, double> spike = {};

  double norm_to_clip_to() const {
    return max_norm && *max_norm != 0 ? *max_norm : own_max_norm.value_or(0.0);
  }
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
  void add(const at::Tensor& verdict, bool measured);
  // (number, skipped, norm, max_abs, scale, overflows, spikes) of the last step, or of the last
  // that has reached the host; norm and max_abs are None where nothing was measured. overflows and
  // spikes: steps skipped so far. None before the first step.
  py::object newest(bool wait) const;
  // (number, steps skipped in a row, scale, norm, whether for its norm) where the newest step on
  // the host was skipped, else None; never waits.
  py::object skipped() const;
  // What a limit knows of the norms so far (core/norm_limit.h, NormHistory): on the device of the
  // steps, and as numbers, None where no step has needed it; to get them waits for the device.
  at::Tensor history_on(const at::Device& device);
  py::object norm_history() const;
  void set_norm_history(const std::optional<std::array<double, 4>>& numbers);
  const at::Tensor& verdict() const { return verdict_; }
  int64_t count() const { return count_; }
  const std::shared_ptr<StepReports>& reports() const { return reports_; }

 private:
  // Of the last step, or the last that has reached the host; there has been one.
  std::optional<StepReport> report(bool wait) const;

  at::Tensor verdict_, memory_;
  std::shared_ptr<StepReports> reports_;
  at::Tensor history_;
  StepCounts counts_ = {};  // of steps on a CPU
  int64_t count_ = 0;
  bool measured_ = false;
};

// Steps from several threads follow one another.
class Stepper {
 public:
  explicit Stepper(py::object hooks) : hooks_(std::move(hooks)) {}

  // Drops what is derived from param_groups and state, and the last step's report.
  void forget();
  // Whether a CUDA graph has captured a step of the tensors that there are now.
  bool is_captured() const { return captured_; }
  py::object norm_history() const { return log_.norm_history(); }
  void set_norm_history(const std::optional<std::array<double, 4>>& numbers);
  // One step. Returns StepLog::skipped.
  py::object step(const py::list& rules, const py::list& groups, const py::dict& states,
                  StepInputs& given, const py::object& read);
  // Reads the gradients once, for a step that is handed the result. read: reads a bucket's
  // gradients in place of this object, where the backward pass has read some; or None.
  std::shared_ptr<Measured> measure(const py::list& rules, const py::list& groups,
                                    const py::dict& states, const py::object& read);
  StepLog& log() { return log_; }

 private:
  const std::shared_ptr<Gathered>& gather(const Layouts& layouts, const py::list& rules,
                                          const py::list& groups, const py::dict& states);
  std::shared_ptr<Measured> measured(const py::object& read) const;
  void warn_of_graph();

  std::recursive_mutex busy_;
  py::object hooks_;
  std::shared_ptr<Gathered> gathered_;
  bool captured_ = false;
  int64_t moves_ = 0;            // of the buckets' tensors, up to the last step
  int64_t sharded_modules_ = 0;  // of fully_shard, when the parameters were last looked up in them
  StepLog log_;
};

// A scaler's number as a float32 tensor of one element on the device; none for None.
std::optional<at::Tensor> scalar_on(const at::Device& device, const py::object& number);

// One step of the rule of a bucket; releases the GIL. `given` has no callbacks yet. sum_updates: of
// StepCallbacks, or None. interrupt: where one that comes while Python makes updates is kept, so
// that the step ends first; null to raise it at once.
void apply_bucket(Bucket& bucket, const std::vector<HyperTensors>& hypers, at::Tensor& verdict,
                  ApplyInputs given, const py::object& sum_updates, Interrupt* interrupt);

}  // namespace amp_mp
