#pragma once
// Rules that divide the step by the root of a sum or mean of squares (RMSprop is in rmsprop.h),
// Adadelta also by that of its own updates, and Lion, which takes signs.
#include "core/rules/base.h"

namespace amp_mp {

// Duchi, Hazan & Singer, "Adaptive subgradient methods" (2011), in torch's form. State: sum.
struct Adagrad {
  static constexpr States kKept = {{"sum", Kind::square, false, "initial_accumulator_value"}};
  static constexpr Numbers kNumbers = {
      "lr", "lr_decay", "eps", "weight_decay", {"adagrad_w_mode", "decoupled"}};
  float lr, weight_decay;
  float shrink;  // 1 - lr weight_decay if that is decoupled, else 1
  RootDivisor divide;

  static AMP_MP_BOTH Adagrad at(const Hyper& h, const Clock& c) {
    const double rate = h.lr / (1 + (c.step - 1) * h.lr_decay);
    return {.lr = float(rate),
            .weight_decay = float(h.decoupled ? 0.0 : h.weight_decay),
            .shrink = float(h.decoupled ? 1 - rate * h.weight_decay : 1.0),
            .divide = {1, float(h.eps)}};
  }

  AMP_MP_BOTH Fraction moments(float g, float w, float& sum) const {
    // add the gradient of the L2 penalty
    g = add_decay(g, weight_decay, w);
    // add up the squares of all gradients so far
    sum = sum + g * g;
    return {g, sum};
  }

  AMP_MP_BOTH void take(float quotient, float& w, float&) const {
    // decay the weight and take the step
    w = shrink * w - lr * quotient;
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& sum) const {
    take(divide(moments(g, w, sum)), w, sum);
  }
};

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
    square_avg = rho * square_avg + (one_minus_rho * g) * g;
    // the gradient in units of the updates so far
    return {sqrtf(acc_delta + eps) * g, square_avg + eps};
  }

  AMP_MP_BOTH void take(float delta, float& w, float&, float& acc_delta) const {
    // average the square of the update
    acc_delta = rho * acc_delta + (one_minus_rho * delta) * delta;
    // take the step
    w = w - lr * delta;
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& square_avg, float& acc_delta) const {
    take(divide(moments(g, w, square_avg, acc_delta)), w, square_avg, acc_delta);
  }
};

// Kingma & Ba, "Adam: a method for stochastic optimization" (2015), algorithm 2, in torch's form:
// eps is added to |g|. States: m = exp_avg, u = exp_inf.
struct Adamax {
  static constexpr States kKept = {{"exp_avg", Kind::moment}, {"exp_inf", Kind::exact}};
  static constexpr Numbers kNumbers = {"lr", kBeta1, kBeta2, "eps", "weight_decay"};
  float beta1, one_minus_beta1, beta2, eps, weight_decay;
  float step_size;  // lr / (1 - beta1^t)

  static AMP_MP_BOTH Adamax at(const Hyper& h, const Clock& c) {
    return {.beta1 = float(h.beta1),
            .one_minus_beta1 = float(1 - h.beta1),
            .beta2 = float(h.beta2),
            .eps = float(h.eps),
            .weight_decay = float(h.weight_decay),
            .step_size = float(h.lr / (1 - c.beta1_power))};
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& m, float& u) const {
    // add the gradient of the L2 penalty
    g = add_decay(g, weight_decay, w);
    // update the first moment
    m = beta1 * m + one_minus_beta1 * g;
    // update the infinity norm, a decaying maximum of |g|; a NaN is the largest
    const float decayed = beta2 * u, size = fabsf(g) + eps;
    u = size > decayed || size != size ? size : decayed;
    // correct the bias of the first moment and take the step; u has none
    w = w - step_size * (m / u);
  }
};

// Chen et al., "Symbolic discovery of optimization algorithms" (2023), algorithm 2. State:
// m = exp_avg.
struct Lion {
  static constexpr States kKept = {{"exp_avg", Kind::moment}};
  static constexpr Numbers kNumbers = {"lr", kBeta1, kBeta2, "weight_decay", "cautious"};
  float lr, beta1, one_minus_beta1, beta2, one_minus_beta2;
  Decay decay;

  static AMP_MP_BOTH Lion at(const Hyper& h, const Clock&) {
    return {.lr = float(h.lr),
            .beta1 = float(h.beta1),
            .one_minus_beta1 = float(1 - h.beta1),
            .beta2 = float(h.beta2),
            .one_minus_beta2 = float(1 - h.beta2),
            .decay = Decay::at(h)};
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& m) const {
    // interpolate between momentum and gradient, and keep the sign; 0 and NaN stay as they are
    const float c = beta1 * m + one_minus_beta1 * g;
    const float sign = sign_of(c);
    // update the momentum
    m = beta2 * m + one_minus_beta2 * g;
    // decay the weight and take the step
    w = decay(sign, w) * w - lr * sign;
  }
};

}  // namespace amp_mp

// The list of this family: struct, operator name.
#define AMP_MP_RULES_OF_adaptive(X) \
  X(Adagrad, adagrad_)              \
  X(Adadelta, adadelta_)            \
  X(Adamax, adamax_)                \
  X(Lion, lion_)
