// The numbers that a param_group has for a step.
#include "torch/state/rule_table.h"

namespace amp_mp {

const HyperMember& hyper_named(const std::string& name) {
  const HyperMember* found = hyper_member(name.c_str());
  if (!found) throw py::type_error("amp_mp: Hyper has no number \"" + name + "\"");
  return *found;
}

void read_number(HyperTensors& to, const HyperMember& member, PyObject* value, PyObject* key) {
  if (member.flag) {
    to.hyper.*member.flag = truth_of(value, key);
    return;
  }
  if (member.number == &Hyper::lr && THPVariable_Check(value)) {
    to.lr = THPVariable_Unpack(value);
    return;
  }
  const double number = PyFloat_AsDouble(value);
  if (number == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    throw py::value_error(text_of(key) + " must be a number, found " + repr_of(value));
  }
  to.hyper.*member.number = number;
}

HyperTensors read_group(const std::vector<HyperNumber>& own, PyObject* group) {
  static PyObject *const seed = PyUnicode_InternFromString("seed"), *const maximize =
                                                                        PyUnicode_InternFromString(
                                                                            "maximize");
  HyperTensors numbers = {};
  for (const HyperNumber& row : own) {
    const py::object& when = row.when;
    if (!when.is_none() && !truth_of(number_of(group, when.ptr()), when.ptr())) continue;
    PyObject* value = number_of(group, row.key.ptr());
    if (row.index < 0) {
      read_number(numbers, *row.member, value, row.key.ptr());
    } else {
      const py::object one = number_at(value, row.index, row.key.ptr());
      read_number(numbers, *row.member, one.ptr(), row.key.ptr());
    }
  }
  read_number(numbers, *hyper_member("maximize"), number_of(group, maximize), maximize);
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

}  // namespace amp_mp
