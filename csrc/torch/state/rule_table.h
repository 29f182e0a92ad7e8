#pragma once
// What an optimizer keeps for each parameter under a rule, as optim/state/schema.py declares it:
// which entry of the parameter's state holds what, in which format.
#include <optional>
#include <string>
#include <vector>

#include "plan.h"
#include "torch/python/objects.h"

namespace amp_mp {

// One format that a state may be stored in, and the entries that then hold it.
struct StoredFormat {
  Format format;
  at::ScalarType dtype;
  py::object entry, scales;  // scales: None for a format without groups
};

// A tensor that a rule keeps for every parameter, of the parameter's shape or, of_rows, with one
// number for each row of its matrices (muon/row_norms.h).
struct KeptState {
  py::object name;
  py::object initial;  // the number of the param_group that fills a new one, or None
  bool late;           // a parameter that has taken steps may lack it
  bool of_rows;
  std::vector<StoredFormat> formats;  // those under the state's own name come first
};

// How a param_group's number becomes one of Hyper's.
struct HyperNumber {
  double Hyper::* number = nullptr;
  bool Hyper::* flag = nullptr;
  py::object key;
  int64_t index = -1;  // of group[key], where that holds several
  py::object when;     // the number counts only where group[when] is true, else it is 0; or None
};

// The entry that makes a low-precision parameter a master, by format and the parameter's dtype.
struct MasterEntry {
  py::object entry;
  std::string format;                    // "float32", "split32"
  std::optional<at::ScalarType> weight;  // none: beside any
  at::ScalarType dtype;
};

struct RuleLayout {
  std::string op;  // the native operator, "adamw_"
  std::vector<KeptState> states;
  std::vector<MasterEntry> masters;
  py::object step, powers, own;  // the clock's entries
  double own_start;
  bool own_is_kept;  // a rule's number of its own, which no step loses
  std::vector<HyperNumber> numbers;
  std::vector<py::object> options;  // entries of a group that the slots depend on
  py::object directions;            // optim/rule.py, Directions, or None
  bool needs_norms;

  // The entries that may hold a state, master or clock tensor of the slots.
  std::vector<py::object> keys() const;
};

// The numbers of one param_group. lr may be a tensor of one float32 or float64 number: on the
// step's device it is read when the step runs, elsewhere now.
struct HyperTensors {
  Hyper hyper;
  at::Tensor lr;
};

// One of Hyper's numbers by name; TypeError for a name that it does not have.
HyperNumber hyper_number(const std::string& name);

// A group's number as Hyper has it; a tensor as `lr` stays one. ValueError naming the number.
void read_number(HyperTensors& to, const HyperNumber& row, PyObject* value, PyObject* key);

// The numbers of a param_group for a rule.
HyperTensors read_group(const RuleLayout& layout, PyObject* group);

RuleLayout make_layout(const std::string& op, const py::list& states, const py::list& masters,
                       const py::tuple& clock, double own_start, bool own_is_kept,
                       const py::list& numbers, const py::list& options,
                       const py::object& directions, bool needs_norms);

}  // namespace amp_mp
