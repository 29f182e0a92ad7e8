#pragma once
// The update rules, as the papers write them: one element, float32, for CPU and CUDA alike.
//
// A rule is a struct of constants. `at` makes it once a step from the user's numbers; it computes
// in double and rounds once to float (1 - beta in float would be off by 1.3e-5 at beta = .999). The
// call operator updates one element: g is the true gradient (already unscaled and clipped; negated
// for maximize), w the float32 weight, then the states; w and the states are updated in place.
// kKept: the states, kNumbers: what `at` needs of a param_group (core/rules/declared.h).
//
// Tests compare the expressions with NumPy bit for bit: do not regroup them, and never let a
// compiler fuse a multiplication with an addition.
#include "core/rules/adadelta.h"
#include "core/rules/adam.h"
#include "core/rules/adaptive.h"
#include "core/rules/hyperball.h"
#include "core/rules/layerwise.h"
#include "core/rules/muon.h"
#include "core/rules/sgd.h"

namespace amp_mp {

// The rule list: struct, operator name. A new optimizer is a struct in rules/ and a line here.
#define AMP_MP_FOR_EACH_RULE(X)         \
  X(AdamW, adamw_)                      \
  X(AmsgradAdamW, amsgrad_adamw_)       \
  X(Adam, adam_)                        \
  X(AmsgradAdam, amsgrad_adam_)         \
  X(NAdam, nadam_)                      \
  X(RAdam, radam_)                      \
  X(SGD, sgd_)                          \
  X(ScaledSGD, scaled_sgd_)             \
  X(PlainSGD, plain_sgd_)               \
  X(LARS, lars_)                        \
  X(Adadelta, adadelta_)                \
  X(Adagrad, adagrad_)                  \
  X(Adamax, adamax_)                    \
  X(RMSprop, rmsprop_)                  \
  X(PlainRMSprop, plain_rmsprop_)       \
  X(CenteredRMSprop, centered_rmsprop_) \
  X(Lion, lion_)                        \
  X(LAMB, lamb_)                        \
  X(NovoGrad, novograd_)                \
  X(AdamH, adamh_)                      \
  X(Muon, muon_)                        \
  X(MuonH, muonh_)

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

#define AMP_MP_CHECK(Rule, op)       \
  static_assert(is_declared<Rule>(), \
                #Rule " reads numbers that Hyper has, and has 3 states at most");
AMP_MP_FOR_EACH_RULE(AMP_MP_CHECK)
#undef AMP_MP_CHECK

}  // namespace amp_mp
