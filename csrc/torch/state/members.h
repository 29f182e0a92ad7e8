#pragma once
// An optimizer's parameters in their groups: their rules, their labels, and which a step can
// update. Everything here needs the GIL.
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "torch/state/rule_table.h"

namespace amp_mp {

// A parameter with its place in the optimizer.
struct Member {
  py::object param;
  at::Tensor local;  // the parameter, or a DTensor's shard on this process
  bool is_dtensor;
  Layout layout;     // under its param_group's rule
  py::object group;  // its param_group
  int64_t group_index;
  int64_t tensor_index;  // among all parameters
  std::string label;     // for messages
  py::object state;      // its dict in optimizer.state

  Param tensors() const { return {tensor_of(param), local}; }
};

// A parameter's name for messages: its place in its optimizer's param_groups, and its own name if
// the group has names.
std::string param_label(py::handle group, int64_t number, int64_t position);

// A group's parameters, a list or tuple; TypeError for what is not a sequence.
py::object params_of(py::handle group);

// Whether the groups hold exactly these parameters.
bool have_params(const py::list& groups, const std::vector<py::object>& params);

// Raises ValueError unless there is a rule for each param_group.
void check_rules(const Layouts& rules, const py::list& groups);

// The parameters of all param_groups in order; or only those that are keys of a map. One without
// state gets a new dict, which `states` does not have yet. ValueError as check_rules.
std::vector<Member> members_of(const Layouts& rules, const py::list& groups, const py::dict& states,
                               const std::unordered_map<PyObject*, size_t>* only = nullptr);

// RuntimeError if one of these lacks state where none can be made: in inference mode, and while a
// CUDA graph is captured.
void refuse_new_state(const std::vector<Member>& members);

}  // namespace amp_mp
