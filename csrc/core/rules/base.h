#pragma once
// What every rule is made from.
#include <cmath>
#include <cstdint>

#include "core/macros.h"

namespace amp_mp {

// The numbers of one param_group. A rule reads those it knows.
struct Hyper {
  double lr, beta1, beta2, eps, weight_decay, momentum, dampening, lr_decay, trust;
  uint64_t seed;  // of stochastic rounding
  bool nesterov, maximize, clip, always_adapt;
  // Where the rate is on the device, if it is: so a captured step follows a schedule.
  const void* lr_at = nullptr;
  bool lr_is_double = false;
};

// The rate as it is now, in place of h.lr.
AMP_MP_BOTH void read_rate(Hyper& h) {
  if (!h.lr_at) return;
  h.lr = h.lr_is_double ? *static_cast<const double*>(h.lr_at)
                        : double(*static_cast<const float*>(h.lr_at));
}

// How far one parameter has come. Lives in the optimizer's state, advances on applied steps only.
// The powers are running products: no pow(), and the same bits on every device.
struct Clock {
  double step, beta1_power, beta2_power;
  double layer;  // what a rule remembers of a whole tensor

  AMP_MP_BOTH void tick(const Hyper& h) {
    step += 1;
    beta1_power *= h.beta1;
    beta2_power *= h.beta2;
  }
};

// Of one tensor, for the rules that look at them: of the gradient as the rule sees it, of the
// weights before the step, of the update before its rate.
struct Norms {
  double grad, weight, update;
};

template <class Rule>
constexpr bool needs_norms = requires { Rule::kNorms; };
template <class Rule>
constexpr bool needs_update_norm = requires { Rule::kUpdateNorm; };

template <class Rule>
AMP_MP_BOTH Rule make_rule(const Hyper& h, Clock& c, [[maybe_unused]] const Norms& n) {
  if constexpr (needs_norms<Rule>) {
    return Rule::at(h, c, n);
  } else {
    return Rule::at(h, c);
  }
}

}  // namespace amp_mp
