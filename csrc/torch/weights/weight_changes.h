#pragma once
// Notes of which weights change, for as long as an amp.Changes wants them: see core/changes.h.
// Everything here needs the GIL but follow, changes and memory.
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
  // Notes for a parameter, or a DTensor's part on this process, in float16, bfloat16 or float32;
  // float32 weights are rounded to `dtype` to compare them. No bit is set, and the sum is 0: who
  // makes them looks at the weight and begins (looks.cpp).
  WeightChanges(py::handle param, at::ScalarType dtype);

  // Whether the weight still has the dtype and size of these notes, which move to its device.
  bool follow(const at::Tensor& weight);
  Changes changes() const;
  // int64: the sum, then the bits.
  const at::Tensor& memory() const { return memory_; }
  at::ScalarType dtype() const { return dtype_; }
  // Keeps the memory for ever: a CUDA graph writes to it.
  void keep() { keeper_ = keeper_ ? keeper_ : new at::Tensor(memory_); }

 private:
  at::ScalarType dtype_, weight_dtype_;
  int64_t size_;
  at::Tensor memory_;
  at::Tensor* keeper_ = nullptr;
};

// Notes the parameter's changes from now on. ValueError if other notes of it live.
void watch(py::handle param, py::handle owner, const std::shared_ptr<WeightChanges>& changes);
// The parameter's notes, which its steps write; null if there are none.
std::shared_ptr<WeightChanges> changes_of(py::handle param);
// How often `watch` was called: a step looks up its parameters' notes again after each.
uint64_t watched_so_far();

// Notes in each memory which numbers of `after` differ from those of `before`; without a `before`,
// adds all of `after` to the sum. dtypes: float32 weights are rounded to these to compare them.
void compare(const Tensors& after, const std::vector<std::optional<at::Tensor>>& before,
             const Tensors& memory, const std::vector<at::ScalarType>& dtypes);

}  // namespace amp_mp
