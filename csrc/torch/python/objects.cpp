#include "torch/python/objects.h"

namespace amp_mp {

const PythonFunctions& python_functions() {
  static const PythonFunctions& functions = *[] {
    const auto from = [](const char* module, const char* name) -> py::object {
      return py::module_::import(module).attr(name);
    };
    constexpr const char* shards = "amp_mp.sharding.shards";
    return new PythonFunctions{from(shards, "is_dtensor"),
                               from(shards, "like"),
                               from(shards, "origin_of"),
                               from(shards, "shards_of"),
                               from(shards, "is_placed_as"),
                               from(shards, "whole"),
                               from(shards, "part"),
                               from(shards, "part_of_whole"),
                               from("amp_mp.sharding.gradients", "local_gradient"),
                               from("amp_mp.optim.step.params", "refuse_param"),
                               from("amp_mp.optim.state", "original_values")};
  }();
  return functions;
}

PyObject* item_of(PyObject* dict, PyObject* key) {
  if (!PyDict_Check(dict)) throw py::type_error("amp_mp: a dict is needed, found " + repr_of(dict));
  PyObject* found = PyDict_GetItemWithError(dict, key);
  if (!found && PyErr_Occurred()) throw py::error_already_set();
  return found == Py_None ? nullptr : found;
}

py::object fast_sequence(PyObject* object) {
  if (PyList_Check(object) || PyTuple_Check(object))
    return py::reinterpret_borrow<py::object>(object);
  const bool is_sequence = PySequence_Check(object) && !PyUnicode_Check(object) &&
                           !PyBytes_Check(object) && !is_tensor(object);
  return is_sequence ? owned(PySequence_List(object)) : py::object();
}

void set_item(PyObject* dict, const py::object& key, const py::object& value) {
  if (PyDict_SetItem(dict, key.ptr(), value.ptr()) < 0) throw py::error_already_set();
}

void drop_item(PyObject* dict, const py::object& key) {
  if (PyDict_GetItemWithError(dict, key.ptr())) PyDict_DelItem(dict, key.ptr());
}

double number_in(PyObject* object) {
  if (is_plain(object)) {
    return doubles_on_host(THPVariable_Unpack(object)).item<double>();
  }
  const double number = PyFloat_AsDouble(object);
  if (number == -1 && PyErr_Occurred()) throw py::error_already_set();
  return number;
}

PyObject* number_of(PyObject* group, PyObject* key) {
  if (!PyDict_Check(group))
    throw py::type_error("a param_group must be a dict, found " + repr_of(group));
  PyObject* found = PyDict_GetItemWithError(group, key);
  if (!found && PyErr_Occurred()) throw py::error_already_set();
  if (!found) throw py::key_error(text_of(key));
  return found;
}

bool truth_of(PyObject* value, PyObject* key) {
  const int truth = PyObject_IsTrue(value);
  if (truth >= 0) return truth == 1;
  PyErr_Clear();
  throw py::value_error(text_of(key) + " must be True or False, found " + repr_of(value));
}

py::object number_at(PyObject* value, int64_t index, PyObject* key) {
  if (PyObject* found = PySequence_GetItem(value, Py_ssize_t(index)))
    return py::reinterpret_steal<py::object>(found);
  PyErr_Clear();
  throw py::value_error(text_of(key) + " must be two numbers, found " + repr_of(value));
}

bool is_plain(PyObject* object) {
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return type == THPVariableClass || type == ParameterClass;
}

bool is_dtensor(PyObject* object) {
  return !is_plain(object) && py::cast<bool>(python_functions().is_dtensor(py::handle(object)));
}

bool is_tensor(PyObject* object) { return object && THPVariable_Check(object); }

at::Tensor local_of(PyObject* tensor) {
  if (!is_tensor(tensor))
    throw py::type_error("amp_mp: a tensor is needed, found " + repr_of(tensor));
  if (!is_dtensor(tensor)) return THPVariable_Unpack(tensor);
  return THPVariable_Unpack(py::handle(tensor).attr("_local_tensor").ptr());
}

py::object like(const at::Tensor& local, PyObject* param, const py::object& shape) {
  const py::object plain = wrapped(local);
  return is_dtensor(param) ? python_functions().like(plain, py::handle(param), shape) : plain;
}

int64_t count_sharded_modules() {
  static PyObject* const name = PyUnicode_InternFromString("torch.distributed._composable_state");
  PyObject* module = PyDict_GetItemWithError(PyImport_GetModuleDict(), name);
  if (!module) return 0;
  const py::object states = py::getattr(module, "_module_state_mapping", py::none());
  return states.is_none() ? 0 : int64_t(py::len(states));
}

std::string shape_text(at::IntArrayRef sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
  return text + (sizes.size() == 1 ? ",)" : ")");
}

std::string text_of(const py::handle& object) { return py::cast<std::string>(py::str(object)); }
std::string repr_of(const py::handle& object) { return py::cast<std::string>(py::repr(object)); }
std::string quoted(PyObject* name) { return repr_of(py::handle(name)); }

}  // namespace amp_mp
