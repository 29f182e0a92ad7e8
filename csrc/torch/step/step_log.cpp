#include <ATen/ops/tensor.h>

#include "torch/device.h"
#include "torch/step/steps.h"

namespace amp_mp {
namespace {

const Verdict& verdict_on_cpu(const at::Tensor& verdict) {
  return *reinterpret_cast<const Verdict*>(verdict.const_data_ptr<double>());
}

}  // namespace

at::Tensor StepLog::verdict_on(const at::Device& device) {
  if (!memory_.defined() || memory_.device() != device) memory_ = new_verdict(device);
  return memory_;
}

std::shared_ptr<StepReports> StepLog::reports_on(const at::Device& device) {
  if (device.is_cpu()) {
    reports_.reset();
  } else if (!reports_ || reports_->device() != device) {
    reports_ = std::make_shared<StepReports>(device);
  }
  return reports_;
}

at::Tensor StepLog::decide(const at::Device& device, const Tensors& totals,
                           const py::object& scale) {
  Tensors rows;
  for (const at::Tensor& total : totals) rows.push_back(total.unsqueeze(0));
  CriteriaTensors inputs;
  inputs.scale = scalar_on(device, scale);
  inputs.reports = reports_on(device);
  const at::Tensor verdict = decide_on(device, rows, inputs);
  add(verdict, true);
  return verdict;
}

void StepLog::add(const at::Tensor& verdict, bool measured, bool scale_updated) {
  verdict_ = verdict;
  measured_ = measured;
  scale_updated_ = scale_updated;
  ++count_;
  if (reports_ || !verdict.is_cpu()) return;
  const double found = verdict_on_cpu(verdict).skip;
  counts_.skipped_in_a_row = found != 0 ? counts_.skipped_in_a_row + 1 : 0;
  counts_.overflows += found == kOverflow;
  counts_.spikes += found == kSpike;
}

std::optional<StepReport> StepLog::report(bool wait) const {
  if (reports_) return reports_->newest(wait);
  return StepReport{uint64_t(count_),         verdict_on_cpu(verdict_), 0,
                    counts_.skipped_in_a_row, counts_.overflows,        counts_.spikes};
}

py::object StepLog::newest(bool wait) const {
  if (!verdict_.defined()) return py::none();
  std::optional<StepReport> found;
  {
    const py::gil_scoped_release release;
    found = report(wait);
  }
  if (!found) return py::none();
  const Verdict& v = found->verdict;
  const auto if_measured = [&](double x) -> py::object {
    return measured_ ? py::object(py::float_(x)) : py::none();
  };
  return py::make_tuple(found->seal, v.skip != 0, if_measured(v.norm), if_measured(v.max_abs),
                        v.scale, found->overflows, found->spikes);
}

py::object StepLog::skipped() const {
  if (!verdict_.defined() || is_capturing(verdict_.device())) return py::none();
  const std::optional<StepReport> found = report(false);
  if (!found || !found->skipped_in_a_row) return py::none();
  const Verdict& v = found->verdict;
  return py::make_tuple(found->seal, found->skipped_in_a_row, v.scale, v.norm, v.skip == kSpike);
}

at::Tensor StepLog::history_on(const at::Device& device) {
  if (history_.defined() && history_.device() == device) return history_;
  check_may_allocate(device);
  if (!history_.defined()) set_norm_history(std::array<double, 4>{});
  return history_ = history_.to(device);
}

py::object StepLog::norm_history() const {
  if (!history_.defined()) return py::none();
  at::Tensor here;
  {
    const py::gil_scoped_release release;
    here = history_.cpu();
  }
  const double* found = here.const_data_ptr<double>();
  return py::make_tuple(found[0], found[1], found[2], found[3]);
}

void StepLog::set_norm_history(const std::optional<std::array<double, 4>>& numbers) {
  history_.reset();
  if (numbers) history_ = at::tensor(at::ArrayRef<double>(*numbers), at::kDouble);
}

}  // namespace amp_mp
