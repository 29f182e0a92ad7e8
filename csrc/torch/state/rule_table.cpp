#include "torch/state/rule_table.h"

#include "torch/python/unpack.h"

namespace amp_mp {
namespace {

py::object interned(const py::handle& name) {
  PyObject* object = py::reinterpret_borrow<py::object>(name).release().ptr();
  PyUnicode_InternInPlace(&object);
  return py::reinterpret_steal<py::object>(object);
}

at::ScalarType dtype_from(const py::handle& dtype) { return py::cast<at::ScalarType>(dtype); }

PyObject* interned_name(const char* name) { return PyUnicode_InternFromString(name); }

}  // namespace

HyperNumber hyper_number(const std::string& name) {
  static const std::pair<const char*, double Hyper::*> doubles[] = {
      {"lr", &Hyper::lr},
      {"beta1", &Hyper::beta1},
      {"beta2", &Hyper::beta2},
      {"eps", &Hyper::eps},
      {"weight_decay", &Hyper::weight_decay},
      {"momentum", &Hyper::momentum},
      {"dampening", &Hyper::dampening},
      {"lr_decay", &Hyper::lr_decay},
      {"trust", &Hyper::trust}};
  static const std::pair<const char*, bool Hyper::*> flags[] = {
      {"nesterov", &Hyper::nesterov},
      {"maximize", &Hyper::maximize},
      {"clip", &Hyper::clip},
      {"always_adapt", &Hyper::always_adapt},
      {"decoupled", &Hyper::decoupled},
      {"bias_correction", &Hyper::bias_correction},
      {"reg_inside_moment", &Hyper::reg_inside_moment},
      {"cautious", &Hyper::cautious}};
  HyperNumber row;
  for (const auto& [own, number] : doubles)
    if (name == own) row.number = number;
  for (const auto& [own, flag] : flags)
    if (name == own) row.flag = flag;
  if (!row.number && !row.flag)
    throw py::type_error("amp_mp: Hyper has no number \"" + name + "\"");
  return row;
}

void read_number(HyperTensors& to, const HyperNumber& row, PyObject* value, PyObject* key) {
  if (row.flag) {
    to.hyper.*row.flag = truth_of(value, key);
    return;
  }
  if (row.number == &Hyper::lr && THPVariable_Check(value)) {
    to.lr = THPVariable_Unpack(value);
    return;
  }
  const double number = PyFloat_AsDouble(value);
  if (number == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    throw py::value_error(text_of(key) + " must be a number, found " + repr_of(value));
  }
  to.hyper.*row.number = number;
}

HyperTensors read_group(const RuleLayout& layout, PyObject* group) {
  static PyObject *const seed = interned_name("seed"), *const maximize = interned_name("maximize");
  HyperTensors numbers = {};
  for (const HyperNumber& row : layout.numbers) {
    const py::object& when = row.when;
    if (!when.is_none() && !truth_of(number_of(group, when.ptr()), when.ptr())) continue;
    PyObject* value = number_of(group, row.key.ptr());
    if (row.index < 0) {
      read_number(numbers, row, value, row.key.ptr());
    } else {
      const py::object one = number_at(value, int64_t(row.index), row.key.ptr());
      read_number(numbers, row, one.ptr(), row.key.ptr());
    }
  }
  static const HyperNumber maximizes = hyper_number("maximize");
  read_number(numbers, maximizes, number_of(group, maximize), maximize);
  PyObject* found = number_of(group, seed);
  const unsigned long long value = PyLong_Check(found) && !PyBool_Check(found)
                                       ? PyLong_AsUnsignedLongLong(found)
                                       : (unsigned long long)(-1);
  const bool wrong = PyErr_Occurred() || !PyLong_Check(found) || PyBool_Check(found);
  if (wrong) {
    PyErr_Clear();
    throw py::value_error("seed must be a whole number of [0, 2^64), found " + repr_of(found));
  }
  numbers.hyper.seed = value;
  return numbers;
}

std::vector<py::object> RuleLayout::keys() const {
  std::vector<py::object> keys;
  const auto add = [&](const py::object& key) {
    for (const py::object& known : keys)
      if (known.is(key)) return;
    keys.push_back(key);
  };
  for (const MasterEntry& master : masters) add(master.entry);
  add(step);
  for (const KeptState& state : states)
    for (const StoredFormat& stored : state.formats) {
      add(stored.entry);
      if (!stored.scales.is_none()) add(stored.scales);
    }
  return keys;
}

RuleLayout make_layout(const std::string& op, const py::list& states, const py::list& masters,
                       const py::tuple& clock, double own_start, bool own_is_kept,
                       const py::list& numbers, const py::list& options,
                       const py::object& directions, bool needs_norms) {
  RuleLayout layout;
  layout.op = op;
  for (const py::handle row : states) {
    const auto [name, initial, late, of_rows, formats] =
        py::cast<std::tuple<py::object, py::object, bool, bool, py::list>>(row);
    KeptState state{
        interned(name), initial.is_none() ? initial : interned(initial), late, of_rows, {}};
    for (const py::handle each : formats) {
      const auto [format, dtype, entry, scales] =
          py::cast<std::tuple<std::string, py::object, py::object, py::object>>(each);
      state.formats.push_back({format_named(format), dtype_from(dtype), interned(entry),
                               scales.is_none() ? scales : interned(scales)});
    }
    layout.states.push_back(std::move(state));
  }
  for (const py::handle row : masters) {
    const auto [format, weight, entry, dtype] =
        py::cast<std::tuple<std::string, py::object, py::object, py::object>>(row);
    layout.masters.push_back({interned(entry), format,
                              weight.is_none() ? std::nullopt : std::optional(dtype_from(weight)),
                              dtype_from(dtype)});
  }
  layout.step = interned(clock[0]);
  layout.powers = interned(clock[1]);
  layout.own = interned(clock[2]);
  layout.own_start = own_start;
  layout.own_is_kept = own_is_kept;
  for (const py::handle row : numbers) {
    const auto [name, key, index, when] =
        py::cast<std::tuple<std::string, py::object, py::object, py::object>>(row);
    HyperNumber number = hyper_number(name);
    number.key = interned(key);
    number.index = index.is_none() ? -1 : py::cast<int64_t>(index);
    number.when = when.is_none() ? when : interned(when);
    layout.numbers.push_back(std::move(number));
  }
  for (const py::handle option : options) layout.options.push_back(interned(option));
  layout.directions = directions;
  layout.needs_norms = needs_norms;
  return layout;
}

}  // namespace amp_mp
