// An optimizer's parameters in their groups: their rules, labels, and which can be stepped.
#include <c10/core/InferenceMode.h>

#include <unordered_map>

#include "torch/device.h"
#include "torch/state/members.h"

namespace amp_mp {

py::object params_of(py::handle group) {
  static PyObject* const key = PyUnicode_InternFromString("params");
  const py::handle params = number_of(group, key);
  py::object found = fast_sequence(params);
  if (!found)
    throw py::type_error(
        "params of a param_group must be a list, tuple or ParameterList of tensors, found a " +
        std::string(Py_TYPE(params.ptr())->tp_name));
  return found;
}

bool have_params(const py::list& groups, const std::vector<py::object>& params) {
  size_t at = 0;
  for (const py::handle group : groups) {
    const py::object own = params_of(group);
    const auto length = size_t(PySequence_Fast_GET_SIZE(own.ptr()));
    if (at + length > params.size()) return false;
    for (size_t i = 0; i < length; ++i)
      if (PySequence_Fast_GET_ITEM(own.ptr(), Py_ssize_t(i)) != params[at++].ptr()) return false;
  }
  return at == params.size();
}

void check_rules(const Layouts& rules, const py::list& groups) {
  TORCH_CHECK_VALUE(rules.size() == groups.size(), "amp_mp: there are ", rules.size(),
                    " rules, but ", groups.size(), " param_groups");
  refuse_none(rules);
}

std::string param_label(py::handle group, int64_t number, int64_t position) {
  static PyObject* const key = PyUnicode_InternFromString("param_names");
  const py::handle names = item_of(group, key);
  std::string label =
      "parameter " + std::to_string(position) + " of group " + std::to_string(number);
  const bool named = names && PySequence_Check(names.ptr());  // a file may have anything there
  if (!named || PySequence_Size(names.ptr()) <= position) return label;
  return label + " (" + repr_of(owned(PySequence_GetItem(names.ptr(), Py_ssize_t(position)))) + ")";
}

std::vector<Member> members_of(const Layouts& rules, const py::list& groups, const py::dict& states,
                               const std::unordered_map<PyObject*, size_t>* only) {
  check_rules(rules, groups);
  // States by parameter: a look-up in the dict itself would call Tensor.__hash__.
  std::unordered_map<PyObject*, py::object> known;
  for (const auto& [param, state] : states)
    if (PyDict_Check(state.ptr()))
      known.emplace(param.ptr(), py::reinterpret_borrow<py::object>(state));
  std::vector<Member> members;
  int64_t index = -1;
  for (size_t number = 0; number < groups.size(); ++number) {
    const py::object group = groups[number];
    const auto params = py::reinterpret_borrow<py::sequence>(params_of(group));
    for (size_t position = 0; position < params.size(); ++position) {
      py::object param = params[position];
      ++index;
      if (only && !only->contains(param.ptr())) continue;
      std::string label = param_label(group, int64_t(number), int64_t(position));
      if (!is_tensor(param))
        throw py::type_error(label + " must be a tensor, found " + repr_of(param));
      const auto found = known.find(param.ptr());
      members.push_back({param, local_of(param), is_dtensor(param), rules[number], group,
                         int64_t(number), index, std::move(label),
                         found == known.end() ? py::dict() : found->second});
    }
  }
  return members;
}

void refuse_new_state(const std::vector<Member>& members) {
  TORCH_CHECK(!c10::InferenceMode::is_enabled(),
              "the first step, or the first one after a change of the optimizer's tensors, makes "
              "state, and what torch.inference_mode() makes cannot be updated later; call step "
              "outside of it");
  for (const Member& member : members)
    TORCH_CHECK(!is_capturing(member.local.device()),
                "the optimizer's tensors are not what they were at its last step, and a CUDA graph "
                "is being captured; take a step before capturing, and change nothing in between");
}

}  // namespace amp_mp
