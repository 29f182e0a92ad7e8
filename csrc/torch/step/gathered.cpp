#include "torch/step/gathered.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <unordered_map>

#include "torch/device.h"

namespace amp_mp {
namespace {

// Existing states by parameter: a look-up in the dict itself would call Tensor.__hash__.
std::unordered_map<PyObject*, PyObject*> by_param(const py::dict& states) {
  std::unordered_map<PyObject*, PyObject*> found;
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(states.ptr(), &at, &key, &value);)
    if (PyDict_Check(value)) found.emplace(key, value);
  return found;
}

const at::Tensor& tensor_of(const py::object& param) { return THPVariable_Unpack(param.ptr()); }

}  // namespace

Gathered::Gathered(const Layouts& rules, const py::list& groups, const py::dict& states,
                   const py::object& hooks) {
  struct Batch {
    Layout layout;
    at::Device device;
    std::vector<Member> members;
  };
  std::vector<Batch> batches;
  std::vector<at::Device> devices;
  const auto known = by_param(states);
  bool any_dtensor = false;
  std::vector<Member> members = members_of(rules, groups);
  for (Member& member : members) {
    params_.push_back(member.param);
    any_dtensor = any_dtensor || member.is_dtensor;
    const py::object& directions = member.layout->directions;
    if (!directions.is_none()) directions.attr("refuse")(member.group, member.param, member.label);
    const at::Device device = member.local.device();
    auto batch = std::find_if(batches.begin(), batches.end(), [&](const Batch& each) {
      return each.device == device && each.layout == member.layout;
    });
    if (batch == batches.end()) batch = batches.insert(batch, {member.layout, device, {}});
    devices.push_back(device);
    const auto found = known.find(member.param.ptr());
    const bool has_state = found != known.end() && PyDict_Size(found->second) > 0;
    if (!has_state && !tensor_of(member.param).grad().defined()) {
      dormant_.push_back(member.param.ptr());
      continue;
    }
    if (found != known.end())
      member.state = py::reinterpret_borrow<py::object>(found->second);
    else
      member.state = py::dict();
    batch->members.push_back(std::move(member));
  }
  refuse_new_state(devices);
  const bool any_sharded = count_sharded_modules() > 0;
  std::vector<Member> offloaded;
  for (const Batch& batch : batches)
    for (const Member& member : batch.members) {
      refuse_param(member, any_sharded);
      refuse_state(member);
      if (offloads(member.group.ptr(), member.local)) offloaded.push_back(member);
    }
  const HostRoom room = room_for(offloaded);
  py::list held;
  for (Batch& batch : batches) {
    py::list indices;
    for (const Member& member : batch.members)
      if (PyDict_Size(member.state.ptr()) == 0) states[member.param] = member.state;
    buckets_.push_back(std::make_shared<Bucket>(batch.layout, batch.device,
                                                std::move(batch.members), hooks.attr("own_keys")));
    for (const Member& member : buckets_.back()->members()) indices.append(member.tensor_index);
    held.append(py::make_tuple(py::cast(batch.device), indices));
  }
  for (const auto& [param, state] : states)
    states_.push_back(py::reinterpret_borrow<py::object>(state));
  py::list params;
  for (const py::object& param : params_) params.append(param);
  whole_ = hooks.attr("make_whole")(held, params, any_dtensor);
}

bool Gathered::is_current(const Layouts& rules, const py::list& groups,
                          const py::dict& states) const {
  size_t at = 0;
  for (const py::handle group : groups) {
    const py::object params = params_of(group.ptr());
    const Py_ssize_t length = PySequence_Fast_GET_SIZE(params.ptr());
    if (at + size_t(length) > params_.size()) return false;
    for (Py_ssize_t i = 0; i < length; ++i)
      if (PySequence_Fast_GET_ITEM(params.ptr(), i) != params_[at++].ptr()) return false;
  }
  if (at != params_.size() || size_t(PyDict_Size(states.ptr())) != states_.size()) return false;
  PyObject *key, *value;
  size_t number = 0;
  for (Py_ssize_t position = 0; PyDict_Next(states.ptr(), &position, &key, &value);)
    if (value != states_[number++].ptr()) return false;
  for (const auto& bucket : buckets_)
    if (!bucket->is_current(rules, groups)) return false;
  return std::none_of(dormant_.begin(), dormant_.end(),
                      [](PyObject* param) { return THPVariable_Unpack(param).grad().defined(); });
}

bool Gathered::has_no_gradient() const {
  return std::none_of(params_.begin(), params_.end(),
                      [](const py::object& p) { return tensor_of(p).grad().defined(); });
}

void Gathered::check_capture() const {
  for (PyObject* param : dormant_) {
    const at::Tensor& t = THPVariable_Unpack(param);
    TORCH_CHECK_VALUE(
        !t.requires_grad() || !is_capturing(t.device()), "a parameter of shape ",
        shape_text(t.sizes()),
        " has had no gradient yet, and a step captured now would leave it out of "
        "every replay; take a step with all gradients before capturing, or freeze it");
  }
}

bool Gathered::needs_norms() const {
  return std::any_of(buckets_.begin(), buckets_.end(),
                     [](const auto& bucket) { return bucket->layout().needs_norms; });
}

void init_states(const Layouts& rules, const py::list& groups, const py::dict& states) {
  std::vector<Member> trained;
  std::vector<at::Device> devices;
  const auto known = by_param(states);
  for (Member& member : members_of(rules, groups)) {
    if (!tensor_of(member.param).requires_grad()) continue;
    const auto found = known.find(member.param.ptr());
    if (found != known.end())
      member.state = py::reinterpret_borrow<py::object>(found->second);
    else
      member.state = py::dict();
    devices.push_back(member.local.device());
    trained.push_back(std::move(member));
  }
  refuse_new_state(devices);
  const bool any_sharded = count_sharded_modules() > 0;
  for (const Member& member : trained) {
    refuse_param(member, any_sharded);
    refuse_state(member);
  }
  const HostRoom room = room_for(trained);
  clocks_of(trained);
  for (const Member& member : trained) {
    states[member.param] = member.state;
    init_state(member);
  }
}

}  // namespace amp_mp
