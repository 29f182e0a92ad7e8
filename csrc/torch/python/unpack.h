#pragma once
// Python's lists and dicts as the operations take them.
#include <torch/csrc/utils/pybind.h>

#include "torch/step/step.h"

namespace py = pybind11;

namespace amp_mp {

// A list of tensors, None for an undefined one. By hand: half the time of pybind11's own caster.
// Raises TypeError naming the argument.
Tensors unpack(const py::sequence& list, const char* argument);

// One of kFormatNames; ValueError for another name.
Format format_named(const std::string& name);

// Raises unless a step can write each of the weights and no two of them share memory. The messages
// use their names.
void check_weights(const py::sequence& weights, const std::vector<std::string>& names);

// Slots::Lists by name.
Slots make_slots(const py::sequence& params, const py::sequence& masters,
                 const py::sequence& states, const py::sequence& scales,
                 const std::vector<std::vector<std::string>>& formats, std::vector<bool> stochastic,
                 const py::sequence& clocks, std::vector<int64_t> groups,
                 std::vector<int64_t> tensor_indices, std::vector<int64_t> firsts,
                 std::vector<std::string> names, const std::optional<py::sequence>& dtensors,
                 std::optional<std::vector<int64_t>> row_lengths,
                 std::optional<std::vector<int64_t>> row_strides,
                 const std::optional<at::Device>& device);

// Hyper's numbers by name, lr maybe a tensor; TypeError for a name it does not have.
HyperTensors make_hyper(const py::kwargs& hyper);

// Whether the lists, one after the other, hold exactly these objects.
bool same_items(const py::list& lists, const py::list& items);

}  // namespace amp_mp
