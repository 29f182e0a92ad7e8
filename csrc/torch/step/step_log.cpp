#include <ATen/ops/empty.h>

#include "torch/device.h"
#include "torch/step/stepper.h"

namespace amp_mp {

at::Tensor StepLog::verdict_on(const at::Device& device) {
  if (!memory_.defined() || memory_.device() != device)
    memory_ = at::empty({sizeof(Verdict) / sizeof(double)},
                        at::TensorOptions().dtype(at::kDouble).device(device));
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

at::Tensor StepLog::decide(const at::Device& device, const py::list& totals,
                           const py::object& scale) {
  std::vector<at::Tensor> rows;
  for (const py::handle total : totals) rows.push_back(py::cast<at::Tensor>(total).unsqueeze(0));
  DecideTensors inputs;
  inputs.scale = scalar_on(device, scale);
  inputs.reports = reports_on(device);
  const at::Tensor verdict = decide_on(device, rows, inputs);
  add(verdict, true);
  return verdict;
}

void StepLog::add(const at::Tensor& verdict, bool measured) {
  verdict_ = verdict;
  measured_ = measured;
  ++count_;
}

py::object StepLog::newest(bool wait) const {
  if (!verdict_.defined()) return py::none();
  Verdict v;
  int64_t number = count_;
  if (reports_) {
    std::optional<StepReport> found;
    {
      const py::gil_scoped_release release;
      found = reports_->newest(wait);
    }
    if (!found) return py::none();
    v = found->verdict;
    number = int64_t(found->seal);
  } else {
    v = *reinterpret_cast<const Verdict*>(verdict_.const_data_ptr<double>());
  }
  const auto if_measured = [&](double x) -> py::object {
    return measured_ ? py::object(py::float_(x)) : py::none();
  };
  return py::make_tuple(number, v.found_inf != 0, if_measured(v.norm), if_measured(v.max_abs),
                        v.scale);
}

py::object StepLog::skipped() {
  if (!verdict_.defined() || is_capturing(verdict_.device())) return py::none();
  if (!reports_) {
    const Verdict& v = *reinterpret_cast<const Verdict*>(verdict_.const_data_ptr<double>());
    skipped_ = v.found_inf != 0 ? skipped_ + 1 : 0;
    return skipped_ ? py::object(py::make_tuple(count_, skipped_, v.scale)) : py::none();
  }
  const std::optional<StepReport> found = reports_->newest(false);
  if (!found || !found->skipped_in_a_row) return py::none();
  return py::make_tuple(found->seal, found->skipped_in_a_row, found->verdict.scale);
}

}  // namespace amp_mp
