#pragma once
// Tables of the native code that the Python package reads instead of repeating them.
#include <torch/csrc/utils/pybind.h>

namespace amp_mp {

void bind_tables(pybind11::module_& m);

}  // namespace amp_mp
