#pragma once
// The entries of a parameter's state in a state dict, before anything of them is loaded.
#include <map>
#include <set>
#include <unordered_map>

#include "torch/state/rule_table.h"

namespace amp_mp {

// An entry that a parameter's state may have in a state dict.
struct SavedEntry {
  // A state or a master, which have the parameter's shape; a number for each row of its matrices;
  // the scales of a state's groups; one of the clock's numbers, the count of steps or the rule's
  // own (core/rules/base.h); or what no step reads any more.
  enum class Holds { state, master, rows, scales, step, own_number, unused };
  std::string name;
  std::string state;   // the name of the state that it holds or has the scales of; or "master"
  std::string format;  // how the state is stored; "" if the dtype says it
  Holds holds;
  std::optional<at::ScalarType> shown;  // its dtype; none: any floating-point dtype is read
  bool in_bytes = false;   // 16-bit integers are shown as bytes: gloo and NCCL carry none of them
  std::string scale = "";  // the entry of the scales; "" without groups
  int64_t group = 1;       // how many of the parameter's elements each of its own is for

  bool is_of_clock() const { return holds == Holds::step || holds == Holds::own_number; }
};

// All of them for an optimizer that may use these rules.
class SavedEntries {
 public:
  explicit SavedEntries(const Layouts& rules);
  const SavedEntry* find(const std::string& name) const;  // null: the rules have no such entry
  // What is wrong with an entry of a format that its state cannot have; empty for others.
  std::string refusal(const std::string& name) const;
  std::set<std::string> in_bytes() const;  // the names of such entries

 private:
  std::unordered_map<std::string, SavedEntry> entries_;
  std::map<std::string, std::string> refused_;
};

// What is wrong with a number of a parameter's clock, for messages; empty if nothing is. name: the
// entry's.
std::string wrong_clock(const py::object& value, const std::string& name);

// The first of a group's parameters whose saved state cannot be loaded: its place, and the entry
// with what is wrong with it; None if all can. rule: the param_group's. states: one for each
// parameter, None without.
py::object wrong_state(const SavedEntries& entries, const RuleLayout& rule, const py::list& states,
                       const py::list& params);

}  // namespace amp_mp
