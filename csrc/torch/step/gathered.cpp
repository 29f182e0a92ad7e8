#include "torch/step/gathered.h"

#include <algorithm>

#include "torch/device.h"

namespace amp_mp {
namespace {

std::pair<Py_ssize_t, py::object> kept_of(py::handle group) {
  static PyObject* const name = PyUnicode_InternFromString("process_groups");
  const py::object params = params_of(group);
  return {PySequence_Fast_GET_SIZE(params.ptr()), got(group, py::handle(name))};
}

}  // namespace

Gathered::Gathered(const Layouts& rules, const py::list& groups, const py::dict& states,
                   const GroupInfo& info)
    : rules_(rules) {
  std::vector<Member> members = members_of(rules, groups, states);
  refuse_new_state(members);
  for (const py::handle group : groups) groups_.push_back(kept_of(group));
  struct NewBucket {
    Layout layout;
    at::Device device;
    std::vector<int64_t> params;
  };
  std::vector<NewBucket> found;
  std::vector<Member> active;
  for (Member& member : members) {
    params_.push_back(member.param);
    has_dtensors_ = has_dtensors_ || member.is_dtensor;
    const at::Device device = member.local.device();
    auto own = std::find_if(found.begin(), found.end(), [&](const NewBucket& each) {
      return each.layout == member.layout && each.device == device;
    });
    if (own == found.end()) own = found.insert(own, {member.layout, device, {}});
    own->params.push_back(member.tensor_index);
    if (py::len(member.state) > 0 || tensor_of(member.param).grad().defined())
      active.push_back(std::move(member));
    else
      dormant_.push_back(member.param);
  }
  // In the order of the groups, also of those without parameters here: buckets have collectives of
  // their own, and another process may begin with other parameters.
  std::stable_sort(found.begin(), found.end(), [&](const NewBucket& a, const NewBucket& b) {
    return std::find(rules.begin(), rules.end(), a.layout) <
           std::find(rules.begin(), rules.end(), b.layout);
  });
  check_members(active);
  const HostRoom room = room_for(active);
  for (const auto& [layout, device, params] : found) {
    std::vector<Member> own;
    for (const Member& member : active) {
      if (member.layout != layout || member.local.device() != device) continue;
      own.push_back(member);
      if (py::len(member.state) == 0) states[member.param] = member.state;
    }
    buckets_.push_back(std::make_shared<Bucket>(layout, device, std::move(own), info));
    std::vector<int64_t> stepped;
    for (const Member& member : buckets_.back()->members()) stepped.push_back(member.tensor_index);
    held_.emplace_back(device, std::move(stepped), params);
  }
  for (const auto& [param, state] : states)
    states_.push_back(py::reinterpret_borrow<py::object>(state));
}

bool Gathered::is_current(const Layouts& rules, const py::list& groups,
                          const py::dict& states) const {
  if (!have_params(groups, params_) || size_t(PyDict_Size(states.ptr())) != states_.size())
    return false;
  if (groups.size() != groups_.size()) return false;
  for (size_t i = 0; i < groups_.size(); ++i) {
    const auto [size, process_groups] = kept_of(groups[i]);
    if (size != groups_[i].first || !process_groups.is(groups_[i].second)) return false;
  }
  PyObject *key, *value;
  size_t number = 0;
  for (Py_ssize_t position = 0; PyDict_Next(states.ptr(), &position, &key, &value);)
    if (value != states_[number++].ptr()) return false;
  for (const auto& bucket : buckets_)
    if (!bucket->is_current(rules, groups)) return false;
  return std::none_of(dormant_.begin(), dormant_.end(),
                      [](py::handle param) { return tensor_of(param).grad().defined(); });
}

void Gathered::find_gradients() const {
  for (const py::handle param : dormant_) {
    const at::Tensor& t = tensor_of(param);
    TORCH_CHECK_VALUE(
        !t.requires_grad() || !is_capturing(t.device()), "a parameter of shape ",
        shape_text(t.sizes()),
        " has had no gradient yet, and a step captured now would leave it out of "
        "every replay; take a step with all gradients before capturing, or freeze it");
  }
  for (const auto& bucket : buckets_) bucket->slots().find_gradients();
}

void init_states(const Layouts& rules, const py::list& groups, const py::dict& states) {
  std::vector<Member> trained = members_of(rules, groups, states);
  std::erase_if(trained, [](auto& member) { return !tensor_of(member.param).requires_grad(); });
  refuse_new_state(trained);
  check_members(trained);
  const HostRoom room = room_for(trained);
  std::vector<bool> stepping;
  for (const Member& member : trained) stepping.push_back(PyDict_Size(member.state.ptr()) > 0);
  clocks_of(trained);
  for (size_t i = 0; i < trained.size(); ++i) {
    states[trained[i].param] = trained[i].state;
    take_entry(trained[i].param, trained[i].state);
    init_state(trained[i], stepping[i]);
  }
}

}  // namespace amp_mp
