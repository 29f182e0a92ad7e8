// What Python sees of the door of the step: the layouts of rules, buckets, the stepper.
#include <ATen/ops/empty.h>

#include "torch/ops.h"
#include "torch/step/stepper.h"

namespace amp_mp {
namespace {

// The bucket of one parameter, with state that is made here where it is missing.
std::shared_ptr<Bucket> bucket_of(const py::list& rules, const py::list& groups,
                                  const py::dict& states, const py::object& own_keys,
                                  const py::object& param, int64_t group, int64_t tensor_index,
                                  std::string label) {
  const std::vector<GroupRule> group_rules = rules_of(rules);
  check_rules(group_rules, groups);
  TORCH_CHECK_INDEX(group >= 0 && size_t(group) < group_rules.size(), "amp_mp: there is no group ",
                    group, " in ", group_rules.size(), " param_groups");
  const GroupRule& rule = group_rules[size_t(group)];
  PyObject* found = item_of(states.ptr(), param.ptr());
  if (found && !PyDict_Check(found))
    throw py::type_error("the state of " + label + " must be a dict, found " + repr_of(found));
  py::dict state = found ? py::reinterpret_borrow<py::dict>(found) : py::dict();
  Member member = {param,        local_of(param.ptr()), is_dtensor(param.ptr()), group,
                   tensor_index, std::move(label),      std::move(state)};
  refuse_param(member, count_sharded_modules() > 0);
  refuse_state(*rule.layout, member);
  if (!found) states[param] = member.state;
  const at::Device device = member.local.device();
  std::vector<Member> members;
  members.push_back(std::move(member));
  return std::make_shared<Bucket>(rule, device, std::move(members), groups, own_keys);
}

// Steps a bucket, deciding from `total` where it is given, else from what was measured of it.
void step_bucket(Bucket& bucket, const py::list& groups,
                 const std::shared_ptr<Measurement>& measured, const py::object& scale,
                 std::optional<double> max_norm, const std::optional<at::Tensor>& total) {
  const at::Device device = bucket.device();
  DecideTensors inputs;
  inputs.scale = scalar_on(device, scale);
  inputs.max_norm = max_norm.value_or(0.0);
  at::Tensor verdict = total ? decide_on(device, {*total}, inputs)
                             : at::empty({sizeof(Verdict) / sizeof(double)},
                                         at::TensorOptions().dtype(at::kDouble).device(device));
  apply_bucket(bucket, bucket.hypers(groups), verdict, measured.get(), total ? nullptr : &inputs,
               false, nullptr, py::none(), nullptr);
}

void bind_inputs(py::module_& m) {
  using Scale = std::shared_ptr<ScaleUpdateTensors>;
  py::class_<StepInputs, std::shared_ptr<StepInputs>>(m, "StepInputs")
      .def(py::init([](py::object scale, py::object found_inf, bool measure,
                       std::shared_ptr<Measured> measured, std::optional<double> max_norm,
                       Scale scale_update, py::object marks, bool from_stock, bool keeps) {
             auto made = std::make_shared<StepInputs>();
             made->scale = std::move(scale);
             made->found_inf = std::move(found_inf);
             made->measure = measure;
             made->measured = std::move(measured);
             made->max_norm = max_norm;
             made->scale_update = std::move(scale_update);
             made->marks = std::move(marks);
             made->from_stock = from_stock;
             made->keeps = keeps;
             return made;
           }),
           py::arg("scale") = py::none(), py::arg("found_inf") = py::none(), py::kw_only(),
           py::arg("measure") = false, py::arg("measured") = py::none(),
           py::arg("max_norm") = py::none(), py::arg("scale_update") = py::none(),
           py::arg("marks") = py::none(), py::arg("from_stock") = false, py::arg("keeps") = false)
      .def_readonly("keeps", &StepInputs::keeps)
      .def_readonly("scale", &StepInputs::scale)
      .def_readwrite("scale_update", &StepInputs::scale_update)
      .def_readonly("scale_updated", &StepInputs::scale_updated)
      .def_readonly("marks", &StepInputs::marks)
      .def_readwrite("used", &StepInputs::used)
      .def_readwrite("checks", &StepInputs::checks)
      .def_readwrite("own_max_norm", &StepInputs::own_max_norm)
      .def_property(
          "norm_limit", [](const StepInputs& inputs) { return inputs.limit.fixed; },
          [](StepInputs& inputs, double norm) { inputs.limit.fixed = norm; })
      .def_property(
          "spike",
          [](const StepInputs& inputs) {
            return std::pair(inputs.limit.sigmas, inputs.limit.window);
          },
          [](StepInputs& inputs, std::pair<double, double> spike) {
            std::tie(inputs.limit.sigmas, inputs.limit.window) = spike;
          });
}

}  // namespace

void bind_stepper(py::module_& m) {
  py::class_<Bucket, std::shared_ptr<Bucket>>(m, "Bucket")
      .def(py::init(&bucket_of), py::arg("rules"), py::arg("groups"), py::arg("states"),
           py::arg("own_keys"), py::arg("param"), py::arg("group"), py::arg("tensor_index"),
           py::arg("label"))
      .def_property_readonly("params",
                             [](const Bucket& bucket) {
                               py::list params;
                               for (const Member& member : bucket.members())
                                 params.append(member.param);
                               return params;
                             })
      .def(
          "is_of",
          [](const Bucket& bucket, const py::list& rules, const py::list& groups,
             const py::dict& states) { return bucket.is_of(states, rules_of(rules), groups); },
          py::arg("rules"), py::arg("groups"), py::arg("states"))
      .def("find_gradients", &Bucket::find_gradients)
      .def("measure",
           [](Bucket& bucket) {
             const py::gil_scoped_release release;
             return std::make_shared<Measurement>(measure(bucket.slots()));
           })
      .def("step", &step_bucket, py::arg("groups"), py::arg("measured"), py::arg("scale"),
           py::arg("max_norm"), py::arg("total") = py::none());

  py::class_<Measured, std::shared_ptr<Measured>>(m, "Measured").def("totals", &Measured::totals);

  bind_inputs(m);
  py::class_<Stepper>(m, "Stepper")
      .def(py::init<py::object>(), py::arg("hooks"))
      .def("forget", &Stepper::forget)
      .def("step", &Stepper::step, py::arg("rules"), py::arg("groups"), py::arg("states"),
           py::arg("inputs"), py::arg("read") = py::none())
      .def_property(
          "norm_history", [](Stepper& stepper) { return stepper.log().norm_history(); },
          &Stepper::set_norm_history)
      .def_property_readonly("is_captured", &Stepper::is_captured)
      .def("measure", &Stepper::measure, py::arg("rules"), py::arg("groups"), py::arg("states"),
           py::arg("read") = py::none())
      .def("decide", &Stepper::decide, py::arg("device"), py::arg("totals"), py::arg("scale"))
      .def_property_readonly("count", [](Stepper& stepper) { return stepper.log().count(); })
      .def_property_readonly("reports", [](Stepper& stepper) { return stepper.log().reports(); })
      .def_property_readonly("verdict",
                             [](Stepper& stepper) -> std::optional<at::Tensor> {
                               const at::Tensor& verdict = stepper.log().verdict();
                               return verdict.defined() ? std::optional(verdict) : std::nullopt;
                             })
      .def("forget_report", [](Stepper& stepper) { stepper.log().forget(); })
      .def(
          "report", [](Stepper& stepper, bool wait) { return stepper.log().newest(wait); },
          py::arg("wait"))
      .def("skipped", [](Stepper& stepper) { return stepper.log().skipped(); });

  m.def("tensors_measured", &tensors_measured);
  m.def(
      "params_of", [](const py::dict& group) { return params_of(group.ptr()); }, py::arg("group"));
  m.def(
      "param_label",
      [](const py::dict& group, int64_t number, int64_t position) {
        return param_label(group.ptr(), number, position);
      },
      py::arg("group"), py::arg("number"), py::arg("position"));
  m.def(
      "init_states",
      [](const py::list& rules, const py::list& groups, const py::dict& states) {
        init_states(rules_of(rules), groups, states);
      },
      py::arg("rules"), py::arg("groups"), py::arg("states"));
  m.def("scalar_on", &scalar_on, py::arg("device"), py::arg("number"));
  m.def(
      "decide",
      [](const at::Device& device, const std::vector<at::Tensor>& totals, const py::object& scale,
         std::optional<double> max_norm) {
        DecideTensors inputs;
        inputs.scale = scalar_on(device, scale);
        inputs.max_norm = max_norm.value_or(0.0);
        return decide_on(device, totals, inputs);
      },
      py::arg("device"), py::arg("totals"), py::kw_only(), py::arg("scale") = py::none(),
      py::arg("max_norm") = py::none());
}

}  // namespace amp_mp
