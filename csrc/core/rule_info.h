#pragma once
// A rule without its arithmetic, as all know it but its own loops and kernels: what includes this
// file is not compiled again when a rule changes.
#include <cstddef>

#include "core/rules/base.h"

namespace amp_mp {

struct RuleInfo {
  const char* op;  // the operator's name, "adamw_"
  int index;       // in rules()
  States kept;
  Numbers numbers;
  int states;  // of a step: those that are kept, and the direction
  bool needs_norms, needs_update_norm, has_direction, has_own_number;  // core/rules/base.h
  OwnNumber own = {"", 0};                                             // if it has one
  size_t bytes;  // of a rule with what one slot's step changes: SlotRule
  // Makes the rule of one slot for a step, in `bytes` bytes; the clock has ticked.
  void (*make)(void* rule, const Hyper& hyper, Clock& clock, const Norms& norms);

  bool is_layerwise() const { return needs_norms || needs_update_norm; }
};

// All rules, in the order of core/rules.h. (Not a std::span, whose header would be read with all
// that includes this file.)
struct RuleList {
  const RuleInfo* first;
  int count;
  const RuleInfo* begin() const { return first; }
  const RuleInfo* end() const { return first + count; }
};
RuleList rules();
// One of them; null if there is none of this operator.
const RuleInfo* rule_named(const char* op);

// A rule with what one slot's step changes: constants and the gradient. Made on the device.
template <class Rule>
struct SlotRule {
  Rule rule;
  float multiplier;  // of the gradient; negative for maximize
  uint64_t seed;
  double step;
  void* grad;
};

}  // namespace amp_mp
