#pragma once
// Apex's amp_C by the passes and rules of amp_mp.
// Everything that takes a Python object needs the GIL, and waits for the passes without it.
#include <initializer_list>
#include <utility>

#include "torch/python/unpack.h"
#include "torch/step/step.h"

namespace amp_mp::apex {

using TensorLists = std::vector<Tensors>;

// ValueError unless there are as many lists as one of `counts` says, all with as many tensors of
// equal shapes; TypeError where one holds something else.
TensorLists unpack_lists(const py::sequence& tensor_lists, std::initializer_list<size_t> counts);

// A number of a struct of doubles that a tensor holds, by its offset in the struct.
inline at::Tensor field(const at::Tensor& numbers, size_t offset) {
  return numbers.select(0, int64_t(offset / sizeof(double)));
}

void bind_steps(py::module_& m);
void bind_amp_c(py::module_& m);  // all of these

}  // namespace amp_mp::apex
