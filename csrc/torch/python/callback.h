#pragma once
// What Python computes in the middle of a step: norms of all processes, directions of Muon.
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <optional>

namespace py = pybind11;

namespace amp_mp {

using Interrupt = std::optional<py::error_already_set>;

// A Python function of one tensor as one of the step's callbacks. `function` must outlive it.
// An interrupt (no Exception) in it goes to `kept`, where that is given, and the function runs
// again: the first pass has written the momentum by then, so the step is finished before the raise.
inline std::function<at::Tensor(const at::Tensor&)> callback(const py::object& function,
                                                             Interrupt* kept) {
  if (function.is_none()) return {};
  return [&function, kept](const at::Tensor& given) {
    const py::gil_scoped_acquire acquire;
    try {
      return py::cast<at::Tensor>(function(given));
    } catch (const py::error_already_set& error) {
      if (!kept || error.matches(PyExc_Exception)) throw;
      *kept = error;
    }
    return py::cast<at::Tensor>(function(given));
  };
}

}  // namespace amp_mp
