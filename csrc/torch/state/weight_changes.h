#pragma once
// Notes of which weights change, for as long as an amp.Changes wants them: see core/changes.h.
// Everything here needs the GIL but fits, changes and memory.
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <vector>

#include "plan.h"
#include "torch/checks.h"

namespace py = pybind11;

namespace amp_mp {

class WeightChanges {
 public:
  // Of a parameter, of a DTensor the part on this process: float16 or bfloat16, or float32, which
  // is compared as what it rounds to in `dtype`. No bit is set; the sum is that of the weight.
  WeightChanges(py::handle param, at::ScalarType dtype);

  // Whether these are still notes of a weight of this kind, at this place.
  bool fits(const at::Tensor& weight) const;
  Changes changes() const;
  // int64: the sum, then the bits.
  const at::Tensor& memory() const { return memory_; }
  at::ScalarType dtype() const { return dtype_; }
  // Where bits are set, int64, ascending, in the order of the weights' memory.
  at::Tensor places() const;
  // Keeps the memory for ever: a CUDA graph writes to it.
  void keep() { keeper_ = keeper_ ? keeper_ : new at::Tensor(memory_); }

 private:
  at::ScalarType dtype_, weight_dtype_;
  int64_t size_;
  at::Tensor memory_;
  at::Tensor* keeper_ = nullptr;
};

// Notes the parameter's changes from now on. ValueError where others live that do.
void watch(py::handle param, py::handle owner, const std::shared_ptr<WeightChanges>& changes);
// The notes that steps of the parameter make; null for none.
std::shared_ptr<WeightChanges> changes_of(py::handle param);
// How often `watch` was called: a step looks up its parameters' notes again after each.
uint64_t watched_so_far();

// Notes in each memory which numbers of `after` are others than in `before`; without one, adds all
// of `after` to the sum. dtypes: by which float32 weights are compared.
void compare(const Tensors& after, const std::vector<std::optional<at::Tensor>>& before,
             const Tensors& memory, const std::vector<at::ScalarType>& dtypes);

}  // namespace amp_mp
