// The numbers that a param_group has for a step.
#include "torch/state/rule_table.h"

namespace amp_mp {

namespace {

// A group's number as Hyper has it; tensors as lr and weight_decay stay what they are. ValueError
// naming the number.
void read_number(HyperTensors& to, const HyperMember& member, py::handle value, py::handle key) {
  if (member.flag) {
    to.hyper.*member.flag = truth_of(value, key);
    return;
  }
  if (is_tensor(value)) {
    if (member.number == &Hyper::lr) return void(to.lr = tensor_of(value));
    if (member.number == &Hyper::weight_decay) return void(to.weight_decay = tensor_of(value));
  }
  const double number = PyFloat_AsDouble(value.ptr());
  if (number == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    throw py::value_error(text_of(key) + " must be a number, found " + repr_of(value));
  }
  to.hyper.*member.number = number;
}

}  // namespace

HyperTensors read_group(const std::vector<HyperNumber>& own, py::handle group) {
  static PyObject* const seed = PyUnicode_InternFromString("seed");
  static PyObject* const maximize = PyUnicode_InternFromString("maximize");
  HyperTensors numbers = {};
  for (const HyperNumber& row : own) {
    const py::object& when = row.when;
    if (!when.is_none() && !truth_of(number_of(group, when), when)) continue;
    const py::handle value = number_of(group, row.key);
    if (row.index < 0) {
      read_number(numbers, *row.member, value, row.key);
    } else {
      const py::object one = number_at(value, row.index, row.key);
      read_number(numbers, *row.member, one, row.key);
    }
  }
  read_number(numbers, *hyper_member("maximize"), number_of(group, maximize), maximize);
  PyObject* const found = number_of(group, seed).ptr();
  const bool is_whole = PyLong_Check(found) && !PyBool_Check(found);
  if (is_whole) numbers.hyper.seed = PyLong_AsUnsignedLongLong(found);
  if (!is_whole || PyErr_Occurred()) {
    PyErr_Clear();
    throw py::value_error("seed must be a whole number of [0, 2^64), found " + repr_of(found));
  }
  return numbers;
}

}  // namespace amp_mp
