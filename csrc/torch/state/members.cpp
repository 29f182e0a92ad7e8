// An optimizer's parameters in their groups: their rules, labels, and which can be stepped.
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <unordered_map>

#include "torch/device.h"
#include "torch/state/members.h"

namespace amp_mp {
namespace {

bool is_native(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
}

}  // namespace

py::object params_of(PyObject* group) {
  static PyObject* const key = PyUnicode_InternFromString("params");
  PyObject* params = number_of(group, key);
  py::object found = fast_sequence(params);
  if (!found)
    throw py::type_error(
        "params of a param_group must be a list, tuple or ParameterList of tensors, found a " +
        std::string(Py_TYPE(params)->tp_name));
  return found;
}

void check_rules(const Layouts& rules, const py::list& groups) {
  TORCH_CHECK_VALUE(rules.size() == groups.size(), "amp_mp: there are ", rules.size(),
                    " rules, but ", groups.size(), " param_groups");
}

std::string param_label(PyObject* group, int64_t number, int64_t position) {
  static PyObject* const key = PyUnicode_InternFromString("param_names");
  PyObject* names = item_of(group, key);
  std::string label =
      "parameter " + std::to_string(position) + " of group " + std::to_string(number);
  if (!names || PySequence_Size(names) <= position) return label;
  return label + " (" + repr_of(owned(PySequence_GetItem(names, Py_ssize_t(position)))) + ")";
}

std::vector<Member> members_of(const Layouts& rules, const py::list& groups,
                               const std::unordered_map<PyObject*, size_t>* only) {
  check_rules(rules, groups);
  std::vector<Member> members;
  int64_t index = -1;
  for (size_t number = 0; number < groups.size(); ++number) {
    const py::object group = groups[number];
    const auto params = py::reinterpret_borrow<py::sequence>(params_of(group.ptr()));
    for (size_t position = 0; position < params.size(); ++position) {
      py::object param = params[position];
      ++index;
      if (only && !only->contains(param.ptr())) continue;
      std::string label = param_label(group.ptr(), int64_t(number), int64_t(position));
      if (!is_tensor(param.ptr()))
        throw py::type_error(label + " must be a tensor, found " + repr_of(param));
      const bool dtensor = is_dtensor(param.ptr());
      members.push_back({param,
                         local_of(param.ptr()),
                         dtensor,
                         rules[number],
                         group,
                         int64_t(number),
                         index,
                         std::move(label),
                         {}});
    }
  }
  return members;
}

void refuse_param(const Member& member, bool any_sharded) {
  const at::Tensor& t = member.local;
  const bool known = is_plain(member.param.ptr()) && (t.is_cpu() || t.is_cuda()) &&
                     is_native(t.scalar_type()) && !any_sharded;
  if (!known) python_functions().refuse_param(member.param, member.label);
}

void refuse_new_state(const std::vector<at::Device>& devices) {
  TORCH_CHECK(!c10::InferenceMode::is_enabled(),
              "the first step, or the first one after a change of the optimizer's tensors, makes "
              "state, and what torch.inference_mode() makes cannot be updated later; call step "
              "outside of it");
  const bool captures = std::any_of(devices.begin(), devices.end(), is_capturing);
  TORCH_CHECK(!captures,
              "the optimizer's tensors are not what they were at its last step, and a CUDA graph "
              "is being captured; take a step before capturing, and change nothing in between");
}

}  // namespace amp_mp
