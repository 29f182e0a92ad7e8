// Reads a DTensor's attributes through the C API: it happens at every step for every parameter.
#include "torch/step/shards.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

namespace amp_mp {
namespace {

constexpr size_t kAhead = 8;  // how many DTensors ahead are prefetched

struct Names {
  PyObject* local = PyUnicode_InternFromString("_local_tensor");
  PyObject* spec = PyUnicode_InternFromString("_spec");
  PyObject* mesh = PyUnicode_InternFromString("mesh");
  PyObject* placements = PyUnicode_InternFromString("placements");
};

const Names& names_of_attributes() {
  static const Names& names = *new Names;
  return names;
}

py::object attribute(PyObject* object, PyObject* name) {
  PyObject* found = PyObject_GetAttr(object, name);
  if (!found) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
}

bool is_equal(PyObject* a, PyObject* b) {
  if (a == b) return true;
  const int equal = PyObject_RichCompareBool(a, b, Py_EQ);
  if (equal < 0) throw py::error_already_set();
  return equal == 1;
}

// Whether two DTensors are on the same mesh with the same placements.
bool placed_alike(PyObject* a, PyObject* b) {
  const Names& name = names_of_attributes();
  const py::object one = attribute(a, name.spec), other = attribute(b, name.spec);
  if (one.is(other)) return true;
  for (PyObject* part : {name.placements, name.mesh})
    if (!is_equal(attribute(one.ptr(), part).ptr(), attribute(other.ptr(), part).ptr()))
      return false;
  return true;
}

// The shard of a DTensor. One that a collective is still filling is waited for.
at::Tensor shard_of(PyObject* dtensor) {
  py::object shard = attribute(dtensor, names_of_attributes().local);
  TORCH_CHECK_TYPE(THPVariable_Check(shard.ptr()), "amp_mp: a DTensor's shard is not a tensor");
  if (is_subclass(THPVariable_Unpack(shard.ptr())) && py::hasattr(shard, "wait"))
    shard = shard.attr("wait")();
  return THPVariable_Unpack(shard.ptr());
}

}  // namespace

Shards::Shards(std::vector<Shard> own) : own_(std::move(own)), gradients_(own_.size()) {
  for (size_t i = 0; i < own_.size(); ++i) {
    if (!own_[i].dtensor) continue;
    indices_.push_back(i);
    TORCH_CHECK(!dtensor(i).is_inference(), "amp_mp: ", own_[i].name,
                " is an inference tensor, which cannot be updated; create it outside "
                "torch.inference_mode()");
  }
}

const at::Tensor& Shards::dtensor(size_t i) const {
  return THPVariable_Unpack(own_[i].dtensor.ptr());
}

bool Shards::are(const Tensors& params) const {
  const Names& name = names_of_attributes();
  for (size_t k = 0; k < indices_.size(); ++k) {
    if (k + kAhead < indices_.size()) __builtin_prefetch(own_[indices_[k + kAhead]].dtensor.ptr());
    const py::object shard = attribute(own_[indices_[k]].dtensor.ptr(), name.local);
    if (!THPVariable_Check(shard.ptr()) || THPVariable_Unpack(shard.ptr()).unsafeGetTensorImpl() !=
                                               params[indices_[k]].unsafeGetTensorImpl())
      return false;
  }
  return true;
}

void Shards::find_gradients() {
  drop_gradients();
  for (size_t k = 0; k < indices_.size(); ++k) {
    const size_t i = indices_[k];
    if (k + kAhead < indices_.size())
      __builtin_prefetch(dtensor(indices_[k + kAhead]).unsafeGetTensorImpl());
    const at::Tensor& found = dtensor(i).grad();
    if (!found.defined()) continue;
    const auto grad = py::reinterpret_steal<py::object>(THPVariable_Wrap(found));
    PyObject* param = own_[i].dtensor.ptr();
    TORCH_CHECK_TYPE(
        Py_TYPE(grad.ptr()) == Py_TYPE(param) ||
            PyObject_HasAttr(grad.ptr(), names_of_attributes().local),
        "amp_mp: the gradient of ", own_[i].name,
        " is a plain tensor, the parameter is a DTensor; a plain tensor does not say "
        "which part of the whole it is: set .grad to a DTensor placed as the parameter");
    if (placed_alike(grad.ptr(), param)) {
      gradients_[i] = shard_of(grad.ptr());
    } else {
      const Shard& own = own_[i];
      gradients_[i] = local_of(python_functions().local_gradient(own.dtensor, own.name).ptr());
    }
  }
  found_ = true;
}

void Shards::check_found() const {
  TORCH_CHECK(indices_.empty() || found_,
              "amp_mp: some parameters are DTensors, and the gradients of this step have not been "
              "looked up; call find_gradients() before each step");
}

void Shards::drop_gradients() {
  if (indices_.empty()) return;
  for (const size_t i : indices_) gradients_[i].reset();
  found_ = false;
}

}  // namespace amp_mp
