#pragma once
// Rules that divide the step by the root of a sum or mean of squares, and Lion, which takes signs.
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

// Tieleman & Hinton, lecture 6.5 of "Neural networks for machine learning" (2012), in torch's form
// with momentum: the buffer sums up normalised gradients. torch's alpha is beta2 here. States:
// buffer = momentum_buffer, square_avg.
struct RMSprop {
  static constexpr States kKept = {{"momentum_buffer", Kind::moment, true},
                                   {"square_avg", Kind::square}};
  static constexpr Numbers kNumbers = {"lr", "eps", "weight_decay", "momentum", {"alpha", "beta2"}};
  float lr, alpha, one_minus_alpha, weight_decay, momentum;
  RootDivisor divide;

  static AMP_MP_BOTH RMSprop at(const Hyper& h, const Clock&) {
    return {.lr = float(h.lr),
            .alpha = float(h.beta2),
            .one_minus_alpha = float(1 - h.beta2),
            .weight_decay = float(h.weight_decay),
            .momentum = float(h.momentum),
            .divide = {1, float(h.eps)}};
  }

  AMP_MP_BOTH Fraction moments(float g, float w, float&, float& square_avg) const {
    // add the gradient of the L2 penalty
    g = add_decay(g, weight_decay, w);
    // average the square
    square_avg = alpha * square_avg + one_minus_alpha * (g * g);
    return {g, square_avg};
  }

  AMP_MP_BOTH void take(float quotient, float& w, float& buffer, float&) const {
    // add the normalised gradient to the momentum buffer
    buffer = momentum * buffer + quotient;
    // take the step
    w = w - lr * buffer;
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& buffer, float& square_avg) const {
    take(divide(moments(g, w, buffer, square_avg)), w, buffer, square_avg);
  }
};

// RMSprop without momentum keeps no buffer. State: square_avg.
struct PlainRMSprop {
  static constexpr States kKept = {{"square_avg", Kind::square}};
  static constexpr Numbers kNumbers = RMSprop::kNumbers;
  float lr, alpha, one_minus_alpha, weight_decay;
  RootDivisor divide;

  static AMP_MP_BOTH PlainRMSprop at(const Hyper& h, const Clock&) {
    return {.lr = float(h.lr),
            .alpha = float(h.beta2),
            .one_minus_alpha = float(1 - h.beta2),
            .weight_decay = float(h.weight_decay),
            .divide = {1, float(h.eps)}};
  }

  AMP_MP_BOTH Fraction moments(float g, float w, float& square_avg) const {
    // add the gradient of the L2 penalty
    g = add_decay(g, weight_decay, w);
    // average the square
    square_avg = alpha * square_avg + one_minus_alpha * (g * g);
    return {g, square_avg};
  }

  AMP_MP_BOTH void take(float quotient, float& w, float&) const {
    // take the step
    w = w - lr * quotient;
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& square_avg) const {
    take(divide(moments(g, w, square_avg)), w, square_avg);
  }
};

// Graves, "Generating sequences with recurrent neural networks" (2013): RMSprop with the variance
// instead of the mean square. Here it always keeps a momentum buffer, in torch only with momentum.
// States: buffer = momentum_buffer, square_avg, grad_avg.
struct CenteredRMSprop {
  static constexpr States kKept = RMSprop::kKept.with({"grad_avg", Kind::exact, true});
  static constexpr Numbers kNumbers = RMSprop::kNumbers;
  float lr, alpha, one_minus_alpha, weight_decay, momentum;
  RootDivisor divide;

  static AMP_MP_BOTH CenteredRMSprop at(const Hyper& h, const Clock&) {
    return {.lr = float(h.lr),
            .alpha = float(h.beta2),
            .one_minus_alpha = float(1 - h.beta2),
            .weight_decay = float(h.weight_decay),
            .momentum = float(h.momentum),
            .divide = {1, float(h.eps)}};
  }

  AMP_MP_BOTH Fraction moments(float g, float w, float&, float& square_avg, float& grad_avg) const {
    // add the gradient of the L2 penalty
    g = add_decay(g, weight_decay, w);
    // average the square and the gradient; their difference is the variance
    square_avg = alpha * square_avg + one_minus_alpha * (g * g);
    grad_avg = alpha * grad_avg + one_minus_alpha * g;
    return {g, square_avg - grad_avg * grad_avg};
  }

  AMP_MP_BOTH void take(float quotient, float& w, float& buffer, float&, float&) const {
    // add the normalised gradient to the momentum buffer
    buffer = momentum * buffer + quotient;
    // take the step
    w = w - lr * buffer;
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& buffer, float& square_avg,
                              float& grad_avg) const {
    take(divide(moments(g, w, buffer, square_avg, grad_avg)), w, buffer, square_avg, grad_avg);
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
#define AMP_MP_RULES_OF_adaptive(X)     \
  X(Adagrad, adagrad_)                  \
  X(Adamax, adamax_)                    \
  X(RMSprop, rmsprop_)                  \
  X(PlainRMSprop, plain_rmsprop_)       \
  X(CenteredRMSprop, centered_rmsprop_) \
  X(Lion, lion_)
