#pragma once
// The entries of a parameter's state in a state dict, before anything of them is loaded.
#include <map>
#include <set>
#include <unordered_map>

#include "torch/state/rule_table.h"

namespace amp_mp {

// An entry that a parameter's state may have in a state dict.
struct SavedEntry {
  // What has the same shape; row: each row's number; unused: what no step reads any more.
  enum class Like { param, row, scale, number, unused };
  std::string name, state;  // state: what it is a part of, by name; "master"; or "step", the clock
  std::string format;       // how that is stored; "" where the dtype says it
  Like like;
  std::optional<at::ScalarType> shown;  // its dtype; none: any floating-point dtype is read
  bool in_bytes = false;   // 16-bit integers are shown as bytes: gloo and NCCL carry none of them
  std::string scale = "";  // the entry of the scales; "" without groups
};

// All of them for an optimizer that may use these rules.
class SavedEntries {
 public:
  explicit SavedEntries(const py::iterable& rules);
  const SavedEntry* find(const std::string& name) const;  // null: the rules have no such entry
  // What is wrong with an entry of a format that its state cannot have; empty for others.
  std::string refusal(const std::string& name) const;
  std::set<std::string> in_bytes() const;  // the names of such entries

 private:
  std::unordered_map<std::string, SavedEntry> entries_;
  std::map<std::string, std::string> refused_;
};

// What is wrong with a number of a parameter's clock, by its entry's name: no number, no count of
// steps. Empty where it can be.
std::string wrong_clock(const py::object& value, const std::string& name);

// The first of a group's parameters whose saved state cannot be loaded, by its place, with the
// entry and what is wrong with it; None where all can. rules: those that the param_group may have.
// states: of each parameter; None for those without.
py::object wrong_state(const SavedEntries& entries, const py::iterable& rules,
                       const py::list& states, const py::list& params);

}  // namespace amp_mp
