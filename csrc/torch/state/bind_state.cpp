// What Python sees of a parameter's state: arrays of formats, saved states.
#include "torch/bind.h"
#include "torch/python/unpack.h"
#include "torch/state/live_state.h"
#include "torch/state/saved_state.h"

namespace amp_mp {
namespace {

void bind_saved(py::module_& m) {
  py::class_<SavedEntries>(m, "SavedEntries")
      .def(py::init<const Layouts&>(), py::arg("rules"))
      .def("in_bytes", &SavedEntries::in_bytes);
  m.def("wrong_clock", &wrong_clock, py::arg("value"), py::arg("name"));
  m.def("wrong_state", &wrong_state, py::arg("entries"), py::arg("rule"), py::arg("states"),
        py::arg("params"));
  bind_restore(m);
}

void bind_arrays(py::module_& m) {
  m.def("is_on_host", &is_on_host, py::arg("tensor"));
  m.def("copies_on_host", &copies_on_host, py::arg("tensors"),
        py::call_guard<py::gil_scoped_release>());
  m.def(
      "has_groups",
      [](const std::string& format, const py::object& param) {
        return has_groups(format_named(format), param);
      },
      py::arg("format"), py::arg("param"));
  m.def(
      "second_shape",
      [](const std::string& format, const py::object& param,
         const std::optional<std::vector<int64_t>>& part) {
        return py::tuple(py::cast(second_shape(format_named(format), param, part)));
      },
      py::arg("format"), py::arg("param"), py::arg("part") = py::none());
  m.def(
      "copy_as",
      [](const at::Tensor& value, std::optional<at::ScalarType> dtype, const at::Tensor& local) {
        return copy_as(value, dtype.value_or(value.scalar_type()), local);
      },
      py::arg("value"), py::arg("dtype"), py::arg("local"));
  m.def(
      "encode",
      [](const py::object& values, const std::string& format, uint64_t seed, int64_t step,
         int64_t tensor_index) {
        const ArrayTensors made =
            encoded(local_of(values), format_named(format), values, seed, tensor_index, step);
        return std::pair(made.data, made.second);
      },
      py::arg("values"), py::arg("format"), py::kw_only(), py::arg("seed") = 0, py::arg("step") = 0,
      py::arg("tensor_index") = 0);
  m.def(
      "decode",
      [](const at::Tensor& data, const std::optional<at::Tensor>& second,
         const std::string& format) {
        return values_of({data, format_named(format), second.value_or(at::Tensor())});
      },
      py::arg("data"), py::arg("second"), py::arg("format"));
  m.def(
      "decoded_states",
      [](const RuleLayout& rule, const py::object& param, const py::dict& state) {
        py::dict found;
        for (const KeptState& kept : rule.states) {
          const std::optional<HeldState> held = held_state(kept, state);
          if (!held || !held->stored || kept.of_rows) continue;
          const ArrayTensors arrays = {held->data.detach(), held->stored->format, held->scales};
          found[kept.name] = like(values_of(arrays), param);
        }
        return found;
      },
      py::arg("rule"), py::arg("param"), py::arg("state"));
}

}  // namespace

void bind_state(py::module_& m) {
  bind_rule_table(m);
  bind_saved(m);
  bind_arrays(m);
  bind_weights(m);
  bind_loans(m);
  bind_weight_changes(m);
  bind_looks(m);
}

}  // namespace amp_mp
