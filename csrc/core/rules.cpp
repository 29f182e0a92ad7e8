// The list of rules for those who know no rule: checks what each declares, and notes it.
#include "core/rules.h"

#include "core/rule_info.h"

namespace amp_mp {
namespace {

template <class Rule>
constexpr bool is_declared() {
  for (const Number& number : Rule::kNumbers) {
    bool known = false;  // under sanitizers GCC takes no comparison of a pointer for a constant
    for (const HyperMember& member : kHyperMembers)
      known = known || same_text(member.name, number.as);
    if (!known) return false;
  }
  return state_count<Rule> <= kMaxStates;
}

enum Index {
#define AMP_MP_INDEX(Rule, op) kIndexOf_##op,
  AMP_MP_FOR_EACH_RULE(AMP_MP_INDEX)
#undef AMP_MP_INDEX
};

template <class Rule>
constexpr RuleInfo info_of(const char* op, int index) {
  RuleInfo info = {.op = op,
                   .index = index,
                   .kept = Rule::kKept,
                   .numbers = Rule::kNumbers,
                   .states = state_count<Rule>,
                   .needs_norms = needs_norms<Rule>,
                   .needs_update_norm = needs_update_norm<Rule>,
                   .has_direction = has_direction<Rule>,
                   .has_own_number = has_own_number<Rule>,
                   .bytes = sizeof(SlotRule<Rule>),
                   .make = [](void* rule, const Hyper& hyper, Clock& clock, const Norms& norms) {
                     *static_cast<Rule*>(rule) = make_rule<Rule>(hyper, clock, norms);
                   }};
  if constexpr (has_own_number<Rule>) info.own = Rule::kOwn;
  return info;
}

#define AMP_MP_CHECK(Rule, op)       \
  static_assert(is_declared<Rule>(), \
                #Rule " reads numbers that Hyper has, and has 3 states at most");
AMP_MP_FOR_EACH_RULE(AMP_MP_CHECK)
#undef AMP_MP_CHECK

#define AMP_MP_INFO(Rule, op) info_of<Rule>(#op, kIndexOf_##op),
constexpr RuleInfo kRules[] = {AMP_MP_FOR_EACH_RULE(AMP_MP_INFO)};
#undef AMP_MP_INFO

}  // namespace

RuleList rules() { return {kRules, int(sizeof kRules / sizeof *kRules)}; }

const RuleInfo* rule_named(const char* op) {
  for (const RuleInfo& rule : kRules)
    if (same_text(rule.op, op)) return &rule;
  return nullptr;
}

}  // namespace amp_mp
