// What Python sees of the step's parts: statistics, loss scales, and reports of decisions.
#include "torch/bind.h"
#include "torch/step/steps.h"

namespace amp_mp {
void bind_step(py::module_& m) {
  using Maybe = std::optional<at::Tensor>;
  py::class_<ScaleUpdateTensors, std::shared_ptr<ScaleUpdateTensors>>(m, "ScaleUpdate")
      .def(py::init<Maybe, Maybe, Maybe, Maybe, Maybe, Maybe, double, double, int64_t>(),
           py::kw_only(), py::arg("policy") = py::none(), py::arg("policy_out") = py::none(),
           py::arg("scale") = py::none(), py::arg("scale_out") = py::none(),
           py::arg("tracker") = py::none(), py::arg("tracker_out") = py::none(),
           py::arg("growth_factor") = 2.0, py::arg("backoff_factor") = 0.5,
           py::arg("growth_interval") = 2000);
  py::class_<Measurement, std::shared_ptr<Measurement>>(m, "Measurement")
      .def(py::init<at::Tensor>(), py::arg("rows"))
      .def_property_readonly("rows", &Measurement::rows);
  py::class_<StepReport>(m, "DeviceReport")
      .def_readonly("number", &StepReport::seal)
      .def_readonly("next_scale", &StepReport::next_scale)
      .def_readonly("skipped_in_a_row", &StepReport::skipped_in_a_row);
  py::class_<StepReports, std::shared_ptr<StepReports>>(m, "StepReports")
      .def(py::init([](const at::Device& device) { return std::make_shared<StepReports>(device); }),
           py::arg("device"))
      .def_property_readonly("device", &StepReports::device)
      .def(
          "newest",
          [](const StepReports& reports, bool wait) {
            const py::gil_scoped_release release;
            return reports.newest(wait);
          },
          py::arg("wait"));
  m.def("update_scale_", &update_scale_, py::arg("update"), py::arg("found_inf"),
        py::arg("max_abs") = py::none(), py::arg("reports") = py::none(),
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace amp_mp
