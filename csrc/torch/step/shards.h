#pragma once
// The DTensors among an optimizer's parameters. Slots hold their shards, which are plain tensors;
// this class knows the DTensors themselves, and their gradients' shards in the next step.
#include <string>
#include <vector>

#include "torch/python/objects.h"

namespace amp_mp {

// A DTensor as a Python object, null for a plain parameter, and its name for messages. Never a
// second at::Tensor of it: model.to() could not exchange its contents then
// (torch.utils.swap_tensors).
struct Shard {
  py::object dtensor;
  std::string name;
};

class Shards {
 public:
  Shards() = default;
  // One for each parameter. Needs the GIL.
  explicit Shards(std::vector<Shard> own);

  bool any() const { return !indices_.empty(); }
  bool has(size_t i) const { return any() && bool(own_[i].dtensor); }
  const at::Tensor& dtensor(size_t i) const;

  // Whether each DTensor's shard still is the very object in `params`. Needs the GIL.
  bool are(const Tensors& params) const;

  // Looks up the gradients of the next step. One with another placement than its parameter is
  // redistributed, a collective of all processes of its mesh. TypeError for a gradient that is no
  // DTensor. Needs the GIL.
  void find_gradients();

  // Raises unless the gradients of the next step are known.
  void check_found() const;
  const at::Tensor& gradient(size_t i) const { return gradients_[i]; }
  void drop_gradients();  // after a step

 private:
  std::vector<Shard> own_;
  std::vector<size_t> indices_;  // of the DTensors
  bool found_ = false;
  Tensors gradients_;  // undefined where there is none
};

}  // namespace amp_mp
