#pragma once
// All of an optimizer's parameters, those with state in buckets. A step gathers them again only if
// a script has exchanged something. Everything here needs the GIL.
#include "torch/step/bucket.h"

namespace amp_mp {

class Gathered {
 public:
  // Makes the missing state. hooks: optim/step/stepper.py, Hooks. RuntimeError if state is missing
  // while a CUDA graph is captured or in torch.inference_mode.
  Gathered(const Layouts& rules, const py::list& groups, const py::dict& states,
           const py::object& hooks);

  const std::vector<std::shared_ptr<Bucket>>& buckets() const { return buckets_; }
  // Adds statistics over processes (optim/step/stepper.py, make_whole); None if no other process
  // has a part of a parameter.
  const py::object& whole() const { return whole_; }

  // Whether gathering again would find the same tensors in the same places.
  bool is_current(const Layouts& rules, const py::list& groups, const py::dict& states) const;
  bool has_no_gradient() const;
  // Raises during capture for a parameter without state: no replay would step it.
  void check_capture() const;

 private:
  std::vector<std::shared_ptr<Bucket>> buckets_;
  std::vector<py::object> params_, states_;
  std::vector<py::handle> dormant_;  // of params_: no gradient so far, hence no state
  // How many parameters each group has, and its process_groups: a group may have no parameter here.
  std::vector<std::pair<Py_ssize_t, py::object>> groups_;
  py::object whole_;
};

// Makes the state of every trainable parameter now; raises before anything is made.
void init_states(const Layouts& rules, const py::list& groups, const py::dict& states);

}  // namespace amp_mp
