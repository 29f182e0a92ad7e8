#pragma once
// What an optimizer keeps for each parameter under a rule, as core/rules declares it: which entry
// of the parameter's state holds what, in which format. Everything here needs the GIL.
//
// An entry's name says what its tensor holds. A plain name (`exp_avg`) holds nothing but numbers,
// in the precision of its dtype. Codes have names of their own (`exp_avg_m8`), because some ways of
// loading convert dtypes in silence: torch's distributed checkpoint would make a code a number.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/rule_info.h"
#include "torch/python/objects.h"

namespace amp_mp {

// One format that a state may be stored in, and the entries that hold it then.
struct StoredFormat {
  Format format;
  at::ScalarType dtype;
  py::object entry, scales;  // scales: None for a format without groups
};

// A tensor that a rule keeps for every parameter. It has the parameter's shape or, with of_rows,
// one float32 number for each row of its matrices (muon/row_norms.h).
struct KeptState {
  py::object name;
  Kind kind;
  bool late;           // a parameter that has taken steps may lack it
  py::object initial;  // the entry of a param_group whose number fills a new one; or None
  bool of_rows;
  std::vector<StoredFormat> formats;  // those under the state's own name come first

  // Whether it may be stored in the format.
  bool may_be(Format format) const;
};

// How a param_group's entry becomes one of Hyper's numbers.
struct HyperNumber {
  const HyperMember* member;
  py::object key;
  int64_t index = -1;  // in group[key], if that holds several
  py::object when;     // if group[when] is false, the number is 0; or None
  Range range;         // which numbers it may have
};

// The entry that makes a low-precision parameter a master, by format and the parameter's dtype.
struct MasterEntry {
  py::object entry;
  std::string format;                    // "float32", "split32"
  std::optional<at::ScalarType> weight;  // none: beside any
  at::ScalarType dtype;
};
const std::vector<MasterEntry>& master_entries();
// One of them; null if the dtype has none of the format, as of "none".
const MasterEntry* master_entry(const std::string& format, at::ScalarType weight);
// That of a parameter whose group asks for this format: split24 where split20's pairs do not fit.
// Null for a float32 parameter, too.
const MasterEntry* master_entry(const std::string& format, py::handle param);
inline bool is_packed(const MasterEntry& entry) { return entry.dtype == at::kByte; }

// The entry that holds a state in a format.
py::object entry_name(const std::string& state, Format format);

// A rule with its states' entries. Python has it as `_C.Rule` (optim/rule.py).
struct RuleLayout {
  // The rule of an operator. row_state: the name of a state of_rows that the optimizer adds, or
  // None. options: more entries of a group that the slots depend on. ValueError for an operator
  // that is none.
  static std::shared_ptr<RuleLayout> of(const std::string& op, const py::object& row_state,
                                        const std::vector<std::string>& options);

  const RuleInfo* rule;
  std::vector<KeptState> states;
  py::object step, own;  // the clock's entries
  double own_start = 0;
  bool own_is_late = false;  // whether a parameter that has taken steps may lack it
  std::vector<HyperNumber> numbers;
  std::vector<py::object> options;  // entries of a group that the slots depend on

  // The entries that may hold a state, master or clock tensor of the slots.
  std::vector<py::object> keys() const;
};
using Layout = std::shared_ptr<RuleLayout>;
using Layouts = std::vector<Layout>;  // one for each param_group

// TypeError where one of them is None, which pybind11 takes for any pointer.
void refuse_none(const Layouts& rules);

// What each rule of core/rules.h declares.
const std::vector<RuleLayout>& declared_rules();

// The numbers of one param_group. Two may be tensors of one number: on the step's device they are
// read when the step runs, elsewhere now.
struct HyperTensors {
  Hyper hyper;
  at::Tensor lr, weight_decay;
};

// The numbers of a param_group, of which an optimizer has these.
HyperTensors read_group(const std::vector<HyperNumber>& numbers, py::handle group);

}  // namespace amp_mp
