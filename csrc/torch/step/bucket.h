#pragma once
// The parameters with state of one device and rule, and the slots that hold all their tensors.
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include "torch/muon/row_norms.h"
#include "torch/state/live_state.h"

namespace amp_mp {

// What Python knows of an optimizer's param_groups besides what they hold (optim/step/stepper.py).
struct GroupInfo {
  py::object own_keys;  // a set: the groups' entries that are the optimizer's, which alone are read
  // Of each parameter whose update is a whole matrix, by its number among all: the shape of its
  // matrices, and the numbers that Hyper has for such, by name.
  using Matrices = std::pair<std::pair<int64_t, int64_t>, std::map<std::string, double>>;
  std::unordered_map<int64_t, Matrices> matrices;
};

class Bucket {
 public:
  // Makes the missing state, and moves the other state to where the parameters are now; the slots
  // check every tensor. ValueError or TypeError names the parameter. Everything here needs the GIL.
  Bucket(Layout rule, const at::Device& device, std::vector<Member> members, const GroupInfo& info);

  const Layout& layout() const { return layout_; }
  const at::Device& device() const { return device_; }
  const std::vector<Member>& members() const { return members_; }
  Slots& slots() { return slots_; }

  // Whether the state and the groups hold the objects that the slots were made of, and these fit.
  bool is_current(const Layouts& rules, const py::list& groups) const;
  // As is_current, and whether each parameter still has the same dict of state.
  bool is_of(const py::dict& states, const Layouts& rules, const py::list& groups) const;

  // The numbers of the param_groups, one for each group and shape of matrices.
  std::vector<HyperTensors> hypers(const py::list& groups) const;

  // The function that turns a rule's directions into updates (optim/rule.py, MakeUpdates), which
  // Python sets before the first step; None for a rule without directions.
  py::object make_updates = py::none();
  // Normalises the updates afterwards if the rule keeps numbers of rows; else it is empty.
  const muon::RowNorms& row_norms() const { return row_norms_; }

 private:
  // The numbers that members of one group with matrices of one shape share.
  struct SlotGroup {
    int64_t group;
    std::pair<int64_t, int64_t> shape;
    std::vector<std::pair<const HyperMember*, double>> numbers;
    bool operator<(const SlotGroup& other) const {
      return std::tie(group, shape) < std::tie(other.group, other.shape);
    }
  };
  std::vector<int64_t> sort_by_group(const GroupInfo& info);
  Slots make_slots(const std::vector<int64_t>& groups);
  void remember();

  Layout layout_;
  at::Device device_;
  std::vector<Member> members_;
  std::vector<SlotGroup> slot_groups_;
  std::vector<HyperNumber> numbers_;
  Slots slots_;
  // The values of these keys in each state, and of the rule's options in each group, when the
  // bucket was made: is_current compares them. keys_ has no entry that no state has, because each
  // costs a look-up for every parameter in every step.
  std::vector<py::object> keys_, seen_;
  std::vector<std::pair<int64_t, std::vector<py::object>>> options_;
  muon::RowNorms row_norms_;
};

}  // namespace amp_mp
