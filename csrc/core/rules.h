#pragma once
// The update rules, as the papers write them: one element, float32, for CPU and CUDA alike.
//
// A rule is a struct of constants. `at` makes it once a step from the user's numbers; it computes
// in double and rounds once to float (1 - beta in float would be off by 1.3e-5 at beta = .999). The
// call operator updates one element: g is the true gradient (already unscaled and clipped; negated
// for maximize), w the float32 weight, then the states; w and the states are updated in place.
// kKept: the states, kNumbers: what `at` needs of a param_group (core/rules/declared.h).
//
// A header in core/rules is a family, whose loops and kernels are compiled together; its list is at
// its end. A new optimizer is a struct in one of them and a line of its list. Include this file
// only where all rules are needed: what includes it is compiled again after a change of any rule.
//
// Tests compare the expressions with NumPy bit for bit: do not regroup them, and never let a
// compiler fuse a multiplication with an addition.
#include "core/rules/adam.h"
#include "core/rules/adaptive.h"
#include "core/rules/layerwise.h"
#include "core/rules/muon.h"
#include "core/rules/rmsprop.h"
#include "core/rules/sgd.h"

#define AMP_MP_FOR_EACH_RULE(X)                                              \
  AMP_MP_RULES_OF_adam(X) AMP_MP_RULES_OF_sgd(X) AMP_MP_RULES_OF_adaptive(X) \
      AMP_MP_RULES_OF_rmsprop(X) AMP_MP_RULES_OF_layerwise(X) AMP_MP_RULES_OF_muon(X)
