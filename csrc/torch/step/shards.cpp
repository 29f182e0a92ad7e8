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
  static const Names& names = *new Names;  // leaked, since the interpreter may end before
  return names;
}

py::object attribute(py::handle object, PyObject* name) {
  return owned(PyObject_GetAttr(object.ptr(), name));
}

// Whether two DTensors are on the same mesh with the same placements.
bool placed_alike(py::handle a, py::handle b) {
  const Names& name = names_of_attributes();
  const py::object one = attribute(a, name.spec), other = attribute(b, name.spec);
  if (one.is(other)) return true;
  return attribute(one, name.placements).equal(attribute(other, name.placements)) &&
         attribute(one, name.mesh).equal(attribute(other, name.mesh));
}

// The shard of a DTensor; waits for a collective that is still filling it.
at::Tensor shard_of(py::handle dtensor) {
  py::object shard = attribute(dtensor, names_of_attributes().local);
  TORCH_CHECK_TYPE(is_tensor(shard), "amp_mp: a DTensor's shard is not a tensor");
  if (is_subclass(tensor_of(shard)) && py::hasattr(shard, "wait")) shard = shard.attr("wait")();
  return tensor_of(shard);
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

const at::Tensor& Shards::dtensor(size_t i) const { return tensor_of(own_[i].dtensor); }

bool Shards::are(const Tensors& params) const {
  const Names& name = names_of_attributes();
  for (size_t k = 0; k < indices_.size(); ++k) {
    if (k + kAhead < indices_.size()) __builtin_prefetch(own_[indices_[k + kAhead]].dtensor.ptr());
    const py::object shard = attribute(own_[indices_[k]].dtensor, name.local);
    if (!is_tensor(shard) ||
        tensor_of(shard).unsafeGetTensorImpl() != params[indices_[k]].unsafeGetTensorImpl())
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
    const Shard& own = own_[i];
    const py::object grad = wrapped(found);
    TORCH_CHECK_TYPE(
        Py_TYPE(grad.ptr()) == Py_TYPE(own.dtensor.ptr()) ||
            PyObject_HasAttr(grad.ptr(), names_of_attributes().local),
        "amp_mp: the gradient of ", own.name,
        " is a plain tensor, the parameter is a DTensor; a plain tensor does not say "
        "which part of the whole it is: set .grad to a DTensor placed as the parameter");
    if (placed_alike(grad, own.dtensor)) {
      gradients_[i] = shard_of(grad);
    } else {
      gradients_[i] = package().local_gradient(own.dtensor, own.name);
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
