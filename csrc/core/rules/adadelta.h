#pragma once
// Adadelta, whose step is as large as a root mean square of its own updates.
#include "core/rules/base.h"

namespace amp_mp {

// Zeiler, "ADADELTA: an adaptive learning rate method" (2012), in torch's form, with a learning
// rate. torch's rho is beta2 here. States: square_avg and acc_delta, both averages of squares.
struct Adadelta {
  static constexpr States kKept = {{"square_avg", Kind::square}, {"acc_delta", Kind::square}};
  static constexpr Numbers kNumbers = {
      "lr", "eps", "weight_decay", {"rho", "beta2", nullptr, Range::up_to_one}};
  float lr, rho, one_minus_rho, eps, weight_decay;
  RootDivisor divide;  // eps is in the square already

  static AMP_MP_BOTH Adadelta at(const Hyper& h, const Clock&) {
    return {.lr = float(h.lr),
            .rho = float(h.beta2),
            .one_minus_rho = float(1 - h.beta2),
            .eps = float(h.eps),
            .weight_decay = float(h.weight_decay),
            .divide = {1, 0}};
  }

  AMP_MP_BOTH Fraction moments(float g, float w, float& square_avg, float& acc_delta) const {
    // add the gradient of the L2 penalty
    g = add_decay(g, weight_decay, w);
    // average the square
    square_avg = rho * square_avg + one_minus_rho * (g * g);
    // the gradient in units of the updates so far
    return {sqrtf(acc_delta + eps) * g, square_avg + eps};
  }

  AMP_MP_BOTH void take(float delta, float& w, float&, float& acc_delta) const {
    // average the square of the update
    acc_delta = rho * acc_delta + one_minus_rho * (delta * delta);
    // take the step
    w = w - lr * delta;
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& square_avg, float& acc_delta) const {
    take(divide(moments(g, w, square_avg, acc_delta)), w, square_avg, acc_delta);
  }
};

}  // namespace amp_mp

// The list of this family: struct, operator name.
#define AMP_MP_RULES_OF_adadelta(X) X(Adadelta, adadelta_)
