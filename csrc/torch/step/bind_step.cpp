// What Python sees of the step's parts: slots, numbers, statistics, and one operator for each rule.
#include <pybind11/functional.h>

#include "torch/ops.h"
#include "torch/python/unpack.h"
#include "torch/step/stepper.h"

namespace amp_mp {
namespace {

using Maybe = std::optional<at::Tensor>;

template <class Rule>
void step_slots(Slots& slots, const std::vector<HyperTensors>& hypers, at::Tensor& verdict,
                Measurement* measured, const DecideTensors* inputs, bool measures,
                Measurement* weights, decltype(StepCallbacks::sum_updates) sum_updates,
                decltype(StepCallbacks::make_updates) make_updates) {
  const StepCallbacks callbacks = {std::move(sum_updates), std::move(make_updates)};
  apply_<Rule>(slots, hypers, verdict, measured, inputs, measures, weights, callbacks);
}

}  // namespace

void bind_step(py::module_& m) {
  py::class_<HyperTensors>(m, "Hyper").def(py::init(&make_hyper));
  py::class_<ScaleUpdateTensors, std::shared_ptr<ScaleUpdateTensors>>(m, "ScaleUpdate")
      .def(py::init([](Maybe policy, Maybe policy_out, Maybe scale, Maybe scale_out, Maybe tracker,
                       Maybe tracker_out, double growth_factor, double backoff_factor,
                       int64_t growth_interval) {
             return std::make_shared<ScaleUpdateTensors>(policy, policy_out, scale, scale_out,
                                                         tracker, tracker_out, growth_factor,
                                                         backoff_factor, growth_interval);
           }),
           py::kw_only(), py::arg("policy") = py::none(), py::arg("policy_out") = py::none(),
           py::arg("scale") = py::none(), py::arg("scale_out") = py::none(),
           py::arg("tracker") = py::none(), py::arg("tracker_out") = py::none(),
           py::arg("growth_factor") = 2.0, py::arg("backoff_factor") = 0.5,
           py::arg("growth_interval") = 2000);
  py::class_<DecideTensors>(m, "DecideInputs")
      .def(py::init([](Maybe scale, Maybe found_inf, double max_norm,
                       std::shared_ptr<ScaleUpdateTensors> scale_update,
                       std::shared_ptr<StepReports> reports) {
             return DecideTensors{std::move(scale),
                                  std::move(found_inf),
                                  max_norm,
                                  std::move(scale_update),
                                  std::move(reports),
                                  {},
                                  {}};
           }),
           py::arg("scale") = py::none(), py::arg("found_inf") = py::none(),
           py::arg("max_norm") = 0.0, py::arg("scale_update") = py::none(),
           py::arg("reports") = py::none());
  py::class_<Measurement, std::shared_ptr<Measurement>>(m, "Measurement")
      .def(py::init<at::Tensor>(), py::arg("rows"))
      .def_property_readonly("rows", &Measurement::rows);
  py::class_<StepReports, std::shared_ptr<StepReports>>(m, "StepReports")
      .def(py::init([](const at::Device& device) { return std::make_shared<StepReports>(device); }),
           py::arg("device"))
      .def_property_readonly("device", &StepReports::device)
      .def(
          "newest",
          [](const StepReports& reports, bool wait) -> py::object {
            std::optional<StepReport> found;
            {
              const py::gil_scoped_release release;
              found = reports.newest(wait);
            }
            if (!found) return py::none();
            const Verdict& v = found->verdict;
            return py::make_tuple(found->seal, v.found_inf, v.multiplier, v.norm, v.max_abs,
                                  v.scale, found->next_scale, found->skipped_in_a_row);
          },
          py::arg("wait"));

  py::class_<Slots>(m, "Slots")
      .def(py::init(&make_slots), py::kw_only(), py::arg("params"), py::arg("masters"),
           py::arg("states"), py::arg("scales"), py::arg("formats"), py::arg("stochastic"),
           py::arg("clocks"), py::arg("groups"), py::arg("tensor_indices"), py::arg("firsts"),
           py::arg("names"), py::arg("dtensors") = py::none(), py::arg("row_lengths") = py::none(),
           py::arg("row_strides") = py::none(), py::arg("device") = py::none())
      .def("__len__", &Slots::size)
      .def("fit", &Slots::fit)
      .def("find_gradients", &Slots::find_gradients)
      .def("set_gradient", &Slots::set_gradient, py::arg("i"), py::arg("local"))
      .def("drop_gradients", &Slots::drop_gradients)
      .def("check_gradients", &Slots::check_gradients)
      .def(
          "measure_weights",
          [](Slots& slots) { return Measurement(slots.weights(), slots.device()); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "measure", [](const Slots& slots) { return measure(slots); },
          py::call_guard<py::gil_scoped_release>());

  py::dict operators;
#define AMP_MP_BIND(Rule, op)                                                                    \
  operators[#op] = py::cpp_function(                                                             \
      &step_slots<Rule>, py::name(#op), py::arg("slots"), py::arg("hypers"), py::arg("verdict"), \
      py::arg("measured") = py::none(), py::arg("inputs") = py::none(),                          \
      py::arg("measure") = false, py::arg("weights") = py::none(),                               \
      py::arg("sum_updates") = py::none(), py::arg("make_updates") = py::none(),                 \
      py::call_guard<py::gil_scoped_release>());
  AMP_MP_FOR_EACH_RULE(AMP_MP_BIND)
  m.attr("operators") = operators;
}

}  // namespace amp_mp
