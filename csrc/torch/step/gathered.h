#pragma once
// All of an optimizer's parameters, those with state in buckets; gathered again only where a script
// has exchanged something since. Everything here needs the GIL.
#include <unordered_map>

#include "torch/step/bucket.h"

namespace amp_mp {

class Gathered {
 public:
  // Makes the missing state. hooks: optim/step/stepper.py, Hooks. Raises RuntimeError where state
  // cannot be made now: while a CUDA graph is captured, and in torch.inference_mode.
  Gathered(const std::vector<GroupRule>& rules, const py::list& groups, const py::dict& states,
           const py::object& hooks);

  const std::vector<std::shared_ptr<Bucket>>& buckets() const { return buckets_; }
  // What adds statistics over processes; None where no other process has a part of anything.
  const py::object& whole() const { return whole_; }

  // Whether gathering again would find the same tensors in the same places.
  bool is_current(const std::vector<GroupRule>& rules, const py::list& groups,
                  const py::dict& states) const;
  bool has_no_gradient() const;
  // Raises during capture for a parameter without state: no replay would step it.
  void check_capture() const;
  bool needs_norms() const;

 private:
  std::vector<std::shared_ptr<Bucket>> buckets_;
  std::vector<py::object> params_, states_;
  std::vector<PyObject*> dormant_;  // of params_: no gradient so far, hence no state
  py::object whole_;
};

// A parameter's place in its optimizer's param_groups, and its name if the group has names: what
// messages call it.
std::string param_label(PyObject* group, int64_t number, int64_t position);

// A group's parameters, a list or tuple; TypeError for what is not a sequence.
py::object params_of(PyObject* group);

// Raises ValueError unless there is a rule for each param_group.
void check_rules(const std::vector<GroupRule>& rules, const py::list& groups);

// The parameters of all param_groups in order, each with its label; or only those that are keys of
// a map.
std::vector<Member> members_of(const py::list& groups,
                               const std::unordered_map<PyObject*, size_t>* only = nullptr);

// Raises unless a step can update the parameter. any_sharded: whether there are modules of
// fully_shard, which gather parameters for a moment; only Python knows those.
void refuse_param(const Member& member, bool any_sharded);

// Raises RuntimeError where state cannot be made: in inference mode, and during capture.
void refuse_new_state(const std::vector<at::Device>& devices);

// Makes the state of every trainable parameter now; raises before anything is made.
void init_states(const std::vector<GroupRule>& rules, const py::list& groups,
                 const py::dict& states);

// The layout of a rule, from optim/state/schema.py; and the rules of the param_groups with theirs.
Layout layout_of(const py::handle& rule);
std::vector<GroupRule> rules_of(const py::list& rules);

}  // namespace amp_mp
