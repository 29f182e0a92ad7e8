#pragma once
// What loss scaling knows of gradients: the scale that each carries, and whether a script has
// written it since. A gradient that is not noted comes from a plain backward pass or from a script.
// Notes are found by the gradient, and by the weak pointer of its memory alone: they keep no
// gradient alive, and leave a parameter without a weak reference, so that torch.utils.swap_tensors
// takes it. Parameters are passed as lists; those without a gradient are skipped. Needs the GIL.
#include <torch/csrc/utils/pybind.h>

#include <optional>

namespace py = pybind11;

namespace amp_mp {

// Notes the parameters' gradients as they are now. scale: by which they are still to be divided;
// none for true gradients.
void note_gradients(const py::iterable& params, std::optional<double> scale);
// The scale of each parameter whose gradient is noted, also if a script has written it since.
py::dict gradient_scales(const py::iterable& params);
// The parameters whose gradients are noted, and were not written since.
py::set unwritten_gradients(const py::iterable& params);
// Strikes the notes of gradients that were cleared.
void forget_gradients(const py::iterable& params);

}  // namespace amp_mp
