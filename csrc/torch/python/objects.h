#pragma once
// Python objects of an optimizer as the step reads them: parameters, states' dicts, DTensors.
// Everything here needs the GIL.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <vector>

#include "torch/checks.h"
#include "torch/python/functions.h"

namespace py = pybind11;

namespace amp_mp {

// Owns a new reference; throws the Python error if it is null.
inline py::object owned(PyObject* object) {
  if (!object) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

inline py::object wrapped(const at::Tensor& t) { return owned(THPVariable_Wrap(t)); }

inline const at::Tensor& tensor_of(py::handle object) { return THPVariable_Unpack(object.ptr()); }

// dict.get(key), borrowed; null if it is absent or None. got: owned, None instead of null.
py::handle item_of(py::handle dict, py::handle key);
py::object got(py::handle dict, py::handle key);

// A list or tuple itself; a list of another sequence (nn.ParameterList). Null for anything else,
// also for a tensor and a str.
py::object fast_sequence(py::handle object);

void set_item(py::handle dict, py::handle key, const py::object& value);
void drop_item(py::handle dict, py::handle key);  // if it is there

// A Python number, or a tensor of one element, as a double.
double number_in(py::handle object);

// group[key], borrowed; KeyError where it is absent.
py::handle number_of(py::handle group, py::handle key);

// Whether a param_group's value is true; and one of several numbers in it. ValueError, with its
// key, if bool(value) or value[index] raises.
bool truth_of(py::handle value, py::handle key);
py::object number_at(py::handle value, int64_t index, py::handle key);

// Whether the object is a plain torch.Tensor or nn.Parameter, no subclass.
bool is_plain(py::handle object);
bool is_dtensor(py::handle object);
bool is_tensor(py::handle object);

// A DTensor's shard, any other tensor itself; TypeError for what is not a tensor.
at::Tensor local_of(py::handle tensor);

// A parameter, as Python holds it, and its part on this process: a DTensor's shard, or itself. Both
// live as long as the Python object: a copy of a tensor that Python alone holds takes the GIL.
struct Param {
  const at::Tensor &whole, &local;
  bool is_sharded() const { return !whole.is_same(local); }
};
Param param_of(py::handle tensor);

// This process's part as a tensor placed as the parameter: a DTensor beside a DTensor. `shape`: the
// whole tensor's, by default the parameter's.
py::object like(const at::Tensor& local, py::handle param,
                const std::optional<std::vector<int64_t>>& shape = {});

// All of a tensor, as a plain one. All processes must ask for the same DTensors in turn.
at::Tensor whole_of(py::handle value);

std::string shape_text(at::IntArrayRef sizes);  // "(2, 3)", as Python prints a tuple
std::string text_of(const py::handle& object);  // str()
std::string repr_of(const py::handle& object);  // repr()

}  // namespace amp_mp
