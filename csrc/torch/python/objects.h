#pragma once
// Python objects of an optimizer as the step reads them: parameters, states' dicts, DTensors.
// Everything here needs the GIL.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <string>

#include "torch/checks.h"

namespace py = pybind11;

namespace amp_mp {

// Functions of the Python package that the native step calls for what is rare: DTensors, parameters
// that it refuses, and values that `prepare` has kept.
struct PythonFunctions {
  py::object is_dtensor, like, origin_of, shards_of, is_placed_as;  // sharding
  py::object whole, part, part_of_whole, local_gradient;
  py::object refuse_param, first_values;
};
const PythonFunctions& python_functions();

// A new reference's owner; throws the Python error where there is none.
inline py::object owned(PyObject* object) {
  if (!object) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

inline py::object wrapped(const at::Tensor& t) { return owned(THPVariable_Wrap(t)); }

// dict.get(key): a borrowed reference, null where it is absent or None.
PyObject* item_of(PyObject* dict, PyObject* key);

// A list or tuple as it is; of another sequence (nn.ParameterList), no tensor and no str, a list.
// Null for anything else.
py::object fast_sequence(PyObject* object);

void set_item(PyObject* dict, const py::object& key, const py::object& value);
void drop_item(PyObject* dict, const py::object& key);  // if it is there

// A Python number, or a tensor of one element, as a double.
double number_in(PyObject* object);

// group[key], borrowed; KeyError where it is absent.
PyObject* number_of(PyObject* group, PyObject* key);

// Whether a param_group's value is true, and one of several numbers in it. ValueError, by its key,
// for a value that cannot say so, or holds no such number.
bool truth_of(PyObject* value, PyObject* key);
py::object number_at(PyObject* value, int64_t index, PyObject* key);

// Whether the object is a plain torch.Tensor or nn.Parameter, no subclass.
bool is_plain(PyObject* object);
bool is_dtensor(PyObject* object);
bool is_tensor(PyObject* object);

// A DTensor's shard, any other tensor itself; TypeError for what is not a tensor.
at::Tensor local_of(PyObject* tensor);

// This process's part as a tensor placed as the parameter: a DTensor beside a DTensor. `shape`: of
// the whole tensor, by default the parameter's.
py::object like(const at::Tensor& local, PyObject* param, const py::object& shape = py::none());

// How many modules of fully_shard there are.
int64_t count_sharded_modules();

std::string shape_text(at::IntArrayRef sizes);  // "(2, 3)", as Python prints a tuple
std::string text_of(const py::handle& object);  // str()
std::string repr_of(const py::handle& object);  // repr()
std::string quoted(PyObject* name);             // repr() of a str

}  // namespace amp_mp
