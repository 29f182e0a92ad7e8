// What Python sees of weights' records.
#include "torch/bind.h"
#include "torch/state/live_state.h"
#include "torch/weights/master_tensors.h"
#include "torch/weights/weight.h"

namespace amp_mp {
namespace {

std::optional<at::Tensor> optional(at::Tensor t) {
  return t.defined() ? std::optional(std::move(t)) : std::nullopt;
}

}  // namespace

void bind_weights(py::module_& m) {
  py::class_<Stamp>(m, "Stamp")
      .def(py::init<const at::Tensor&>(), py::arg("tensor"))
      .def("still", &Stamp::still, py::arg("tensor"));
  py::class_<Weight, WeightRecord>(m, "Weight")
      .def_property("is_prepared", &Weight::is_prepared, &Weight::set_prepared)
      .def_property("is_replaced", &Weight::is_replaced, &Weight::set_replaced)
      .def_property_readonly("is_lost", &Weight::is_lost)
      .def_property_readonly("is_stepped", &Weight::is_stepped)
      .def_property_readonly("tensors", &Weight::tensors)
      .def_property_readonly("entry", &Weight::entry)
      .def(
          "store",
          [](Weight& w, py::handle param, const at::Tensor& values, bool exactly) {
            w.store(param_of(param), values, exactly);
          },
          py::arg("param"), py::arg("values"), py::arg("exactly") = true)
      .def(
          "is_unwritten",
          [](const Weight& w, py::handle param) { return w.is_unwritten(param_of(param)); },
          py::arg("param"))
      .def(
          "stamp", [](Weight& w, py::handle param) { w.stamp(tensor_of(param), local_of(param)); },
          py::arg("param"))
      .def("drop", &Weight::drop)
      .def(
          "state", [](const Weight& w, py::handle param) { return w.state(param_of(param)); },
          py::arg("param"))
      .def(
          "set_state",
          [](Weight& w, py::handle param, const Weight::State& state) {
            w.set_state(param_of(param), state);
          },
          py::arg("param"), py::arg("state"));
  m.def("weight_of", &weight_of, py::arg("param"));
  m.def("weight_at", &weight_at, py::arg("param"), py::arg("owner") = py::none());
  m.def("float32_of", &float32_of, py::arg("param"), py::arg("stepping") = false);
  m.def(
      "float32_master",
      [](const py::object& param) {
        const ArrayTensors values = {float32_of(param, true), Format::float32, {}};
        return like(made_beside(values, local_of(param), at::kFloat), param);
      },
      py::arg("param"));
  m.def(
      "masters_beside",
      [](const std::vector<py::object>& params, const std::vector<bool>& stepping) {
        std::vector<std::optional<at::Tensor>> found;
        for (size_t i = 0; i < params.size(); ++i) {
          const WeightRecord record = weight_of(params[i]);
          found.push_back(record ? optional(record->beside(param_of(params[i]), stepping.at(i)))
                                 : std::nullopt);
        }
        return found;
      },
      py::arg("params"), py::arg("stepping"));
  m.def(
      "master_values",
      [](const py::object& weight, const py::dict& entries) -> py::object {
        const at::Tensor local = local_of(weight);
        for (const MasterEntry& each : master_entries()) {
          if (each.weight && *each.weight != local.scalar_type()) continue;
          if (const py::handle found = item_of(entries, each.entry))
            return like(master_values(local.detach(), local_of(found)), weight);
        }
        return py::none();
      },
      py::arg("weight"), py::arg("entries"));
  m.def(
      "master_part",
      [](const std::string& entry, const py::object& value, const py::object& param) {
        for (const MasterEntry& each : master_entries()) {
          if (text_of(each.entry) != entry) continue;
          const auto [found, part] = master_part(each, value, param);
          return std::pair(found->entry, part);
        }
        throw py::value_error("amp_mp: \"" + entry + "\" is not a master's entry");
      },
      py::arg("entry"), py::arg("value"), py::arg("param"));
  m.def(
      "take_entries",
      [](const py::list& params, const py::list& states) {
        for (size_t i = 0; i < params.size(); ++i) {
          if (!PyDict_Check(states[i].ptr())) continue;
          take_entry(params[i], states[i]);
          put_entry(weight_of(params[i]), params[i], states[i]);
        }
      },
      py::arg("params"), py::arg("states"));
  m.def(
      "put_entries",
      [](const py::list& groups, const py::dict& states, bool takes) {
        for (const py::handle group : groups)
          for (const py::handle param : params_of(group)) {
            const py::handle state = is_tensor(param) ? item_of(states, param) : py::handle();
            if (!state || !PyDict_Check(state.ptr()) || PyDict_Size(state.ptr()) == 0) continue;
            if (takes) take_entry(param, state);
            put_entry(weight_of(param), param, state);
          }
      },
      py::arg("groups"), py::arg("states"), py::arg("takes") = true);
  m.def(
      "weight_states",
      [](const std::vector<py::object>& params) {
        std::vector<std::optional<Weight::State>> found;
        for (const py::object& param : params) {
          const WeightRecord record = is_tensor(param) ? weight_of(param) : nullptr;
          found.push_back(record ? record->state(param_of(param)) : std::nullopt);
        }
        return found;
      },
      py::arg("params"));
  m.def(
      "set_weight_states",
      [](const std::vector<py::object>& params,
         const std::vector<std::optional<Weight::State>>& states) {
        for (size_t i = 0; i < params.size(); ++i)
          if (states.at(i) && !master_of(params[i]).defined())
            weight_at(params[i])->set_state(param_of(params[i]), *states[i]);
      },
      py::arg("params"), py::arg("states"));
  m.def("release_weights", &release_weights, py::arg("params"));
}

}  // namespace amp_mp
