// What Python sees of a step: gathered tensors, buckets, inputs, the stepper and its log.
#include "torch/bind.h"
#include "torch/ops.h"
#include "torch/step/steps.h"

namespace amp_mp {
namespace {

// A bucket of one parameter. Makes the state that the parameter lacks.
std::shared_ptr<Bucket> bucket_of(const Layouts& rules, const py::list& groups,
                                  const py::dict& states, const GroupInfo& info,
                                  const py::object& param, int64_t group, int64_t tensor_index,
                                  const std::string& label) {
  check_rules(rules, groups);
  TORCH_CHECK_INDEX(group >= 0 && size_t(group) < rules.size(), "amp_mp: there is no group ", group,
                    " in ", rules.size(), " param_groups");
  const py::handle found = item_of(states, param);
  if (found && !PyDict_Check(found.ptr()))
    throw py::type_error("the state of " + label + " must be a dict, found " + repr_of(found));
  const py::object state = found ? py::reinterpret_borrow<py::object>(found) : py::dict();
  const std::vector<Member> members = {{param, local_of(param), is_dtensor(param),
                                        rules[size_t(group)], groups[size_t(group)], group,
                                        tensor_index, label, state}};
  check_members(members);
  if (!found) states[param] = state;
  return std::make_shared<Bucket>(members[0].layout, members[0].local.device(), members, info);
}

CriteriaTensors inputs_on(const at::Device& device, const py::object& scale,
                          std::optional<double> max_norm) {
  CriteriaTensors inputs;
  inputs.scale = scalar_on(device, scale);
  inputs.max_norm = max_norm.value_or(0.0);
  return inputs;
}

// Steps a bucket by a verdict on `total`, or without `total` on the bucket's own statistics.
void step_bucket(Bucket& bucket, const py::list& groups,
                 const std::shared_ptr<Measurement>& measured, const py::object& scale,
                 std::optional<double> max_norm, const std::optional<at::Tensor>& total) {
  const at::Device device = bucket.device();
  const CriteriaTensors inputs = inputs_on(device, scale, max_norm);
  at::Tensor verdict = total ? decide_on(device, {*total}, inputs) : new_verdict(device);
  const ApplyInputs given = {.decides = total ? nullptr : &inputs, .found = measured.get()};
  apply_bucket(bucket, bucket.hypers(groups), verdict, given, py::none(), nullptr);
}

void bind_inputs(py::module_& m) {
  py::class_<StepInputs, std::shared_ptr<StepInputs>>(m, "StepInputs")
      .def(py::init<py::object, py::object, bool>(), py::arg("scale") = py::none(),
           py::arg("found_inf") = py::none(), py::kw_only(), py::arg("measure") = false)
      .def_readonly("found_inf", &StepInputs::found_inf)
      .def_readwrite("scale", &StepInputs::scale)
      .def_readwrite("measured", &StepInputs::measured)
      .def_readwrite("max_norm", &StepInputs::max_norm)
      .def_readwrite("scale_update", &StepInputs::scale_update);
  py::class_<NormLimit>(m, "NormLimit")
      .def(py::init([](double fixed, double sigmas, double window) {
             return NormLimit{.fixed = fixed, .sigmas = sigmas, .window = window};
           }),
           py::arg("fixed") = 0.0, py::kw_only(), py::arg("sigmas") = 0.0, py::arg("window") = 0.0);
}

}  // namespace

void bind_steps(py::module_& m) {
  py::class_<GroupInfo>(m, "GroupInfo")
      .def(py::init<py::object, decltype(GroupInfo::matrices)>(), py::arg("own_keys"),
           py::arg("matrices"));
  py::class_<Bucket, std::shared_ptr<Bucket>>(m, "Bucket")
      .def(py::init(&bucket_of), py::arg("rules"), py::arg("groups"), py::arg("states"),
           py::arg("info"), py::arg("param"), py::arg("group"), py::arg("tensor_index"),
           py::arg("label"))
      .def_property_readonly("rule", &Bucket::layout)
      .def_property_readonly("members",
                             [](const Bucket& bucket) {
                               py::list members;
                               for (const Member& member : bucket.members())
                                 members.append(py::make_tuple(member.param, member.group));
                               return members;
                             })
      .def_readwrite("make_updates", &Bucket::make_updates)
      .def(
          "is_of",
          [](const Bucket& bucket, const Layouts& rules, const py::list& groups,
             const py::dict& states) { return bucket.is_of(states, rules, groups); },
          py::arg("rules"), py::arg("groups"), py::arg("states"))
      .def("find_gradients", [](Bucket& bucket) { bucket.slots().find_gradients(); })
      .def("measure",
           [](Bucket& bucket) {
             const py::gil_scoped_release release;
             return std::make_shared<Measurement>(measure(bucket.slots()));
           })
      .def("step", &step_bucket, py::arg("groups"), py::arg("measured"), py::arg("scale"),
           py::arg("max_norm"), py::arg("total") = py::none());

  py::class_<Measured, std::shared_ptr<Measured>>(m, "Measured").def("totals", &Measured::totals);

  bind_inputs(m);
  py::class_<Collectives>(m, "Collectives")
      .def(py::init([](const py::object& totals, const py::object& of_tensors,
                       const py::object& updates_of) {
             return Collectives{{totals}, {of_tensors}, {updates_of}};
           }),
           py::arg("totals"), py::arg("of_tensors"), py::arg("updates_of"));
  py::class_<Gathered, std::shared_ptr<Gathered>>(m, "Gathered")
      .def_property_readonly("buckets", &Gathered::buckets)
      .def_property_readonly("held", &Gathered::held)
      .def_property_readonly("has_dtensors", &Gathered::has_dtensors)
      .def("is_current", &Gathered::is_current, py::arg("rules"), py::arg("groups"),
           py::arg("states"))
      .def_readwrite("collectives", &Gathered::collectives);
  py::class_<Steps>(m, "Steps")
      .def(py::init<>())
      .def("forget", &Steps::forget)
      .def("gather", &Steps::gather, py::arg("rules"), py::arg("groups"), py::arg("states"),
           py::arg("info"))
      .def("step", &Steps::step, py::arg("gathered").none(false), py::arg("groups"),
           py::arg("inputs"), py::kw_only(), py::arg("checks") = false,
           py::arg("max_norm") = py::none(), py::arg("limit") = py::none())
      .def("measure", &Steps::measure, py::arg("gathered").none(false))
      .def_property_readonly("log", &Steps::log)
      .def_property("norm_history", &Steps::norm_history, &Steps::set_norm_history)
      .def_property_readonly("is_captured", &Steps::is_captured);
  py::class_<StepLog>(m, "StepLog")
      .def_property_readonly("count", &StepLog::count)
      .def_property_readonly("reports", &StepLog::reports)
      .def_property_readonly("verdict", &StepLog::verdict)
      .def_property_readonly("scale_updated", &StepLog::scale_updated)
      .def("decide", &StepLog::decide, py::arg("device"), py::arg("totals"), py::arg("scale"))
      .def("forget", &StepLog::forget)
      .def("newest", &StepLog::newest, py::arg("wait"))
      .def("skipped", &StepLog::skipped);

  m.def("params_of", &params_of, py::arg("group"));
  m.def("refuse_params", &refuse_params, py::arg("group"), py::arg("number"));
  m.def("have_params", &have_params, py::arg("groups"), py::arg("params"));
  m.def("param_label", &param_label, py::arg("group"), py::arg("number"), py::arg("position"));
  m.def("init_states", &init_states, py::arg("rules"), py::arg("groups"), py::arg("states"));
  m.def("scalar_on", &scalar_on, py::arg("device"), py::arg("number"));
  m.def(
      "decide",
      [](const at::Device& device, const Tensors& totals, const py::object& scale,
         std::optional<double> max_norm) {
        return decide_on(device, totals, inputs_on(device, scale, max_norm));
      },
      py::arg("device"), py::arg("totals"), py::kw_only(), py::arg("scale") = py::none(),
      py::arg("max_norm") = py::none());
}

}  // namespace amp_mp
