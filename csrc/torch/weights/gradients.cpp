#include "torch/weights/gradients.h"

#include <unordered_map>

#include "torch/bind.h"
#include "torch/python/objects.h"
#include "torch/weights/weight.h"

namespace amp_mp {
namespace {

struct GradientNote {
  WeakTensor gradient;  // keeps its address, the note's key, from becoming another gradient's
  Stamp stamp;
  std::optional<double> scale;
};

// Leaked: at exit static objects may end before the interpreter does.
auto& gradient_notes = *new std::unordered_map<const c10::TensorImpl*, GradientNote>;

// Calls `use` with each parameter that has a gradient, and with the gradient.
template <class Use>
void for_each_gradient(const py::iterable& params, const Use& use) {
  for (const py::handle param : params) {
    if (!is_tensor(param))
      throw py::type_error("amp_mp: params holds " + repr_of(param) + "; tensors are needed");
    if (const at::Tensor grad = tensor_of(param).grad(); grad.defined()) use(param, grad);
  }
}

const GradientNote* note_of_gradient(const at::Tensor& grad) {
  const auto found = gradient_notes.find(grad.unsafeGetTensorImpl());
  return found == gradient_notes.end() ? nullptr : &found->second;
}

}  // namespace

void note_gradients(const py::iterable& params, std::optional<double> scale) {
  std::erase_if(gradient_notes, [](const auto& each) { return each.second.gradient.expired(); });
  for_each_gradient(params, [&](py::handle, const at::Tensor& grad) {
    gradient_notes.insert_or_assign(
        grad.unsafeGetTensorImpl(),
        GradientNote{WeakTensor(grad.getIntrusivePtr()), Stamp(grad), scale});
  });
}

py::dict gradient_scales(const py::iterable& params) {
  py::dict scales;
  for_each_gradient(params, [&](py::handle param, const at::Tensor& grad) {
    if (const GradientNote* note = note_of_gradient(grad)) scales[param] = note->scale;
  });
  return scales;
}

py::set unwritten_gradients(const py::iterable& params) {
  py::set found;
  for_each_gradient(params, [&](py::handle param, const at::Tensor& grad) {
    if (const GradientNote* note = note_of_gradient(grad); note && note->stamp.still(grad))
      found.add(param);
  });
  return found;
}

void forget_gradients(const py::iterable& params) {
  for_each_gradient(params, [](py::handle, const at::Tensor& grad) {
    gradient_notes.erase(grad.unsafeGetTensorImpl());
  });
}

void bind_gradients(py::module_& m) {
  m.def("note_gradients", &note_gradients, py::arg("params"), py::arg("scale") = py::none());
  m.def("gradient_scales", &gradient_scales, py::arg("params"));
  m.def("unwritten_gradients", &unwritten_gradients, py::arg("params"));
  m.def("forget_gradients", &forget_gradients, py::arg("params"));
}

}  // namespace amp_mp
