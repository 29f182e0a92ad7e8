#pragma once
// The DTensors among an optimizer's parameters. Slots hold their shards, which are plain tensors;
// this class knows the DTensors themselves, and their gradients' shards in the next step.
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "torch/checks.h"

namespace amp_mp {

class Shards {
 public:
  // One DTensor for each parameter, undefined for a plain one. Raises unless each has its parameter
  // as shard. Needs the GIL, as all functions that say so.
  Shards(Tensors dtensors, const Tensors& params, const std::vector<std::string>& names);

  bool any() const { return !indices_.empty(); }
  bool has(size_t i) const { return any() && bool(dtensors_[i]); }
  const at::Tensor& dtensor(size_t i) const;

  // Whether each DTensor's shard still is the very object in `params`. Needs the GIL.
  bool are(const Tensors& params) const;

  // Looks up the gradients of the next step. Returns the indices of those that are not placed as
  // their parameters: set_gradient has to give their shards. TypeError for a gradient that is no
  // DTensor. Needs the GIL.
  std::vector<int64_t> find_gradients(const std::vector<std::string>& names);
  void set_gradient(int64_t i, const at::Tensor& shard);

  // Raises unless the gradients of the next step are known.
  void check_found(const std::vector<std::string>& names) const;
  const at::Tensor& gradient(size_t i) const { return gradients_[i]; }
  void drop_gradients();  // after a step

 private:
  // The DTensors as Python holds them, null for plain parameters. A second at::Tensor of one would
  // keep model.to() from exchanging its contents (torch.utils.swap_tensors).
  std::vector<py::object> dtensors_;
  std::vector<size_t> indices_;  // of the DTensors
  bool found_ = false;
  Tensors gradients_;             // undefined where there is none
  std::vector<int64_t> missing_;  // indices for set_gradient
};

}  // namespace amp_mp
