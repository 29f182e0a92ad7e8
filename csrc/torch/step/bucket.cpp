#include "torch/step/bucket.h"

#include <algorithm>

namespace amp_mp {
namespace {

bool is_stochastic_rounding(py::handle group) {
  static PyObject* const rounding = PyUnicode_InternFromString("rounding");
  return PyUnicode_CompareWithASCIIString(number_of(group, rounding).ptr(), "stochastic") == 0;
}

const HyperMember& hyper_named(const std::string& name) {
  const HyperMember* found = hyper_member(name.c_str());
  if (!found) throw py::type_error("amp_mp: Hyper has no number \"" + name + "\"");
  return *found;
}

}  // namespace

Bucket::Bucket(Layout rule, const at::Device& device, std::vector<Member> members,
               const GroupInfo& info)
    : layout_(std::move(rule)),
      device_(device),
      members_(std::move(members)),
      slots_(make_slots(sort_by_group(info))) {
  remember();
  for (const HyperNumber& number : layout_->numbers)
    if (info.own_keys.contains(number.key)) numbers_.push_back(number);
  const std::vector<int64_t> offsets = slots_.offsets();
  for (const KeptState& kept : layout_->states)
    for (size_t i = 0; kept.of_rows && i < members_.size(); ++i) {
      const Member& member = members_[i];
      row_norms_.add({offsets[i], member.local, member.param, got(member.state, kept.name),
                      member.group, slot_groups_[size_t(slots_.group(i))].shape.first});
    }
}

// Sorts the members by their groups of slots and returns the number of each one's.
std::vector<int64_t> Bucket::sort_by_group(const GroupInfo& info) {
  std::vector<std::pair<SlotGroup, size_t>> found;
  for (size_t i = 0; i < members_.size(); ++i) {
    SlotGroup own{members_[i].group_index, {}, {}};
    const auto matrices = info.matrices.find(members_[i].tensor_index);
    if (matrices != info.matrices.end()) {
      const auto& [shape, numbers] = matrices->second;
      own.shape = shape;
      for (const auto& [name, number] : numbers)
        own.numbers.emplace_back(&hyper_named(name), number);
    }
    found.emplace_back(own, i);
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Member> sorted;
  std::vector<int64_t> numbers;
  for (auto& [own, i] : found) {
    if (slot_groups_.empty() || slot_groups_.back() < own) slot_groups_.push_back(own);
    numbers.push_back(int64_t(slot_groups_.size()) - 1);
    sorted.push_back(std::move(members_[i]));
  }
  members_ = std::move(sorted);
  return numbers;
}

Slots Bucket::make_slots(const std::vector<int64_t>& groups) {
  std::vector<bool> stepping;  // whether the optimizer has state for the weight already
  for (const Member& member : members_) {
    stepping.push_back(PyDict_Size(member.state.ptr()) > 0);
    take_entry(member.param, member.state);
    follow(member);
  }
  const Tensors clocks = clocks_of(members_);
  std::vector<SlotTensors> slots;
  for (size_t i = 0; i < members_.size(); ++i) {
    const Member& member = members_[i];
    SlotTensors& own = slots.emplace_back();
    own.param = member.local;
    own.record = init_state(member, stepping[i]);
    if (own.record) own.master = own.record->master();
    for (const KeptState& kept : layout_->states) {
      if (kept.of_rows) continue;
      const std::optional<HeldState> held = held_state(kept, member.state);
      const Format format = format_of(kept, member);
      own.states.push_back(held ? ArrayTensors{held->data, format, held->scales}
                                : ArrayTensors{{}, format, {}});
    }
    own.stochastic = is_stochastic_rounding(member.group);
    own.clock = clocks[i];
    own.group = groups[i];
    own.tensor_index = member.tensor_index;
    own.name = member.label;
    own.changes = changes_of(member.param);
    if (!member.is_dtensor) continue;
    own.dtensor = member.param;
    own.origin = origin_of(member.param);
  }
  return Slots(std::move(slots), device_);
}

void Bucket::remember() {
  for (const py::object& key : layout_->keys()) {
    std::vector<py::object> values;
    for (const Member& member : members_) values.push_back(got(member.state, key));
    if (std::all_of(values.begin(), values.end(), [](auto& value) { return value.is_none(); }))
      continue;
    keys_.push_back(key);
    seen_.insert(seen_.end(), values.begin(), values.end());
  }
  for (const Member& member : members_) {
    if (!options_.empty() && options_.back().first == member.group_index) continue;
    std::vector<py::object> values;
    for (const py::object& option : layout_->options) values.push_back(got(member.group, option));
    options_.emplace_back(member.group_index, std::move(values));
  }
}

bool Bucket::is_current(const Layouts& rules, const py::list& groups) const {
  for (const auto& [group, values] : options_) {
    if (size_t(group) >= rules.size() || rules[size_t(group)] != layout_) return false;
    for (size_t i = 0; i < values.size(); ++i)
      if (!got(groups[size_t(group)], layout_->options[i]).is(values[i])) return false;
  }
  const size_t count = members_.size();  // raw calls from here, since they run at every step
  for (size_t k = 0; k < keys_.size(); ++k)
    for (size_t i = 0; i < count; ++i) {
      PyObject* found = PyDict_GetItemWithError(members_[i].state.ptr(), keys_[k].ptr());
      if (!found && PyErr_Occurred()) throw py::error_already_set();
      if ((found ? found : Py_None) != seen_[k * count + i].ptr()) return false;
    }
  return slots_.fit();
}

bool Bucket::is_of(const py::dict& states, const Layouts& rules, const py::list& groups) const {
  for (const Member& member : members_)
    if (!member.state.is(item_of(states, member.param))) return false;
  return is_current(rules, groups);
}

std::vector<HyperTensors> Bucket::hypers(const py::list& groups) const {
  std::vector<HyperTensors> found;
  for (const SlotGroup& each : slot_groups_) {
    HyperTensors numbers = read_group(numbers_, groups[size_t(each.group)]);
    for (const auto& [member, number] : each.numbers) numbers.hyper.*member->number = number;
    found.push_back(std::move(numbers));
  }
  return found;
}

}  // namespace amp_mp
