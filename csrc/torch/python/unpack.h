#pragma once
// Python's lists and dicts as the operations take them.
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <variant>
#include <vector>

#include "torch/checks.h"

namespace py = pybind11;

namespace amp_mp {

using TensorOrNumber = std::variant<at::Tensor, double>;  // of one element; of Python

// A list of tensors, None for an undefined one. By hand: half the time of pybind11's own caster.
// Raises TypeError naming the argument.
Tensors unpack(const py::sequence& list, const char* argument);

// One of kFormatNames; ValueError for another name.
Format format_named(const std::string& name);

// Raises unless a step can write each of the weights and no two of them share memory. The messages
// use their names.
void check_weights(const py::sequence& weights, const std::vector<std::string>& names);

}  // namespace amp_mp
