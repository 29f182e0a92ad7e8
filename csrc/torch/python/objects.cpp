#include "torch/python/objects.h"

namespace amp_mp {

py::handle item_of(py::handle dict, py::handle key) {
  if (!PyDict_Check(dict.ptr()))
    throw py::type_error("amp_mp: a dict is needed, found " + repr_of(dict));
  PyObject* found = py::detail::dict_getitem(dict.ptr(), key.ptr());
  return found == Py_None ? nullptr : found;
}

py::object got(py::handle dict, py::handle key) {
  const py::handle found = item_of(dict, key);
  return found ? py::reinterpret_borrow<py::object>(found) : py::none();
}

py::object fast_sequence(py::handle given) {
  PyObject* const object = given.ptr();
  if (PyList_Check(object) || PyTuple_Check(object))
    return py::reinterpret_borrow<py::object>(given);
  const bool is_sequence = PySequence_Check(object) && !PyUnicode_Check(object) &&
                           !PyBytes_Check(object) && !is_tensor(given);
  return is_sequence ? owned(PySequence_List(object)) : py::object();
}

void set_item(py::handle dict, py::handle key, const py::object& value) {
  if (PyDict_SetItem(dict.ptr(), key.ptr(), value.ptr()) < 0) throw py::error_already_set();
}

void drop_item(py::handle dict, py::handle key) {
  if (PyDict_GetItemWithError(dict.ptr(), key.ptr())) PyDict_DelItem(dict.ptr(), key.ptr());
}

double number_in(py::handle object) {
  if (is_plain(object)) return doubles_on_host(tensor_of(object)).item<double>();
  const double number = PyFloat_AsDouble(object.ptr());
  if (number == -1 && PyErr_Occurred()) throw py::error_already_set();
  return number;
}

py::handle number_of(py::handle group, py::handle key) {
  if (!PyDict_Check(group.ptr()))
    throw py::type_error("a param_group must be a dict, found " + repr_of(group));
  PyObject* found = py::detail::dict_getitem(group.ptr(), key.ptr());
  if (!found) throw py::key_error(text_of(key));
  return found;
}

bool truth_of(py::handle value, py::handle key) {
  const int truth = PyObject_IsTrue(value.ptr());
  if (truth >= 0) return truth == 1;
  PyErr_Clear();
  throw py::value_error(text_of(key) + " must be True or False, found " + repr_of(value));
}

py::object number_at(py::handle value, int64_t index, py::handle key) {
  if (PyObject* found = PySequence_GetItem(value.ptr(), Py_ssize_t(index)))
    return py::reinterpret_steal<py::object>(found);
  PyErr_Clear();
  throw py::value_error(text_of(key) + " must be two numbers, found " + repr_of(value));
}

bool is_plain(py::handle object) {
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()));
  return type == THPVariableClass || type == ParameterClass;
}

bool is_dtensor(py::handle object) { return !is_plain(object) && package().is_dtensor(object); }

bool is_tensor(py::handle object) { return object && THPVariable_Check(object.ptr()); }

Param param_of(py::handle tensor) {
  if (!is_tensor(tensor))
    throw py::type_error("amp_mp: a tensor is needed, found " + repr_of(tensor));
  const at::Tensor& whole = tensor_of(tensor);
  return {whole, is_dtensor(tensor) ? tensor_of(tensor.attr("_local_tensor")) : whole};
}

at::Tensor local_of(py::handle tensor) { return param_of(tensor).local; }

py::object like(const at::Tensor& local, py::handle param,
                const std::optional<std::vector<int64_t>>& shape) {
  return is_dtensor(param) ? package().like(local, param, shape) : wrapped(local);
}

at::Tensor whole_of(py::handle value) {
  return is_plain(value) ? tensor_of(value).detach() : package().whole(value);
}

std::string shape_text(at::IntArrayRef sizes) { return text_of(py::tuple(py::cast(sizes.vec()))); }

std::string text_of(const py::handle& object) { return py::cast<std::string>(py::str(object)); }
std::string repr_of(const py::handle& object) { return py::cast<std::string>(py::repr(object)); }

}  // namespace amp_mp
