#pragma once
// All of an optimizer's parameters, those with state in buckets. A step gathers them again only if
// a script has exchanged something. Everything here needs the GIL.
#include "torch/step/bucket.h"

namespace amp_mp {

using Measurements = std::vector<std::shared_ptr<Measurement>>;

// The functions that add statistics over the processes which have a part of the parameters
// (sharding/reduction.py, WholeStatistics).
struct Collectives {
  PythonFunction<Measurements(Measurements found)> totals;
  PythonFunction<std::pair<Measurements, Measurements>(Measurements found, Measurements weights)>
      of_tensors;
  PythonFunction<py::object(int64_t bucket)> updates_of;
};

class Gathered {
 public:
  // Makes the missing state. RuntimeError if some is missing while a CUDA graph is captured or in
  // torch.inference_mode.
  Gathered(const Layouts& rules, const py::list& groups, const py::dict& states,
           const GroupInfo& info);

  const std::vector<std::shared_ptr<Bucket>>& buckets() const { return buckets_; }
  const Layouts& rules() const { return rules_; }
  bool has_dtensors() const { return has_dtensors_; }
  // Of each bucket: its device, the numbers of its parameters among all, and these with those that
  // may become its parameters.
  using Held = std::tuple<at::Device, std::vector<int64_t>, std::vector<int64_t>>;
  const std::vector<Held>& held() const { return held_; }
  // Set by Python before the first step, if other processes have parts of parameters.
  std::optional<Collectives> collectives;

  // Whether gathering again would find the same tensors in the same places.
  bool is_current(const Layouts& rules, const py::list& groups, const py::dict& states) const;
  // For the pass that follows. ValueError during capture for a parameter without state: no replay
  // would step it.
  void find_gradients() const;

 private:
  std::vector<std::shared_ptr<Bucket>> buckets_;
  std::vector<py::object> params_, states_;
  std::vector<py::handle> dormant_;  // of params_: no gradient so far, hence no state
  // How many parameters each group has, and its process_groups: a group may have no parameter here.
  std::vector<std::pair<Py_ssize_t, py::object>> groups_;
  Layouts rules_;
  std::vector<Held> held_;
  bool has_dtensors_ = false;
};

// Makes the state of every trainable parameter now; raises before anything is made.
void init_states(const Layouts& rules, const py::list& groups, const py::dict& states);

}  // namespace amp_mp
