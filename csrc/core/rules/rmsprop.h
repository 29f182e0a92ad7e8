#pragma once
// RMSprop with and without momentum, and with the variance in place of the mean of squares.
#include "core/rules/base.h"

namespace amp_mp {

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
    square_avg = alpha * square_avg + (one_minus_alpha * g) * g;
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
    square_avg = alpha * square_avg + (one_minus_alpha * g) * g;
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
    square_avg = alpha * square_avg + (one_minus_alpha * g) * g;
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

}  // namespace amp_mp

// The list of this family: struct, operator name.
#define AMP_MP_RULES_OF_rmsprop(X) \
  X(RMSprop, rmsprop_)             \
  X(PlainRMSprop, plain_rmsprop_)  \
  X(CenteredRMSprop, centered_rmsprop_)
