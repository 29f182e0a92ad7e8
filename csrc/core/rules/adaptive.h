#pragma once
// Rates divided by roots of sums of squares, and by signs.
#include "core/rules/base.h"

namespace amp_mp {

// Duchi, Hazan & Singer, "Adaptive subgradient methods" (2011), in torch's form.
struct Adagrad {
  static constexpr int kStates = 1, kSquares = 0;  // sum
  float lr, eps, weight_decay;

  static AMP_MP_BOTH Adagrad at(const Hyper& h, const Clock& c) {
    return {float(h.lr / (1 + (c.step - 1) * h.lr_decay)), float(h.eps), float(h.weight_decay)};
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& sum) const {
    g = g + weight_decay * w;
    sum = sum + g * g;
    w = w - lr * (g / (sqrtf(sum) + eps));
  }
};

// Tieleman & Hinton, lecture 6.5 of "Neural networks for machine learning" (2012), in torch's form;
// its alpha is beta2. With momentum, the normalised gradients are averaged.
struct RMSprop {
  static constexpr int kStates = 2, kSquares = 1;  // momentum_buffer, square_avg
  float lr, alpha, one_minus_alpha, eps, weight_decay, momentum;

  static AMP_MP_BOTH RMSprop at(const Hyper& h, const Clock&) {
    return {float(h.lr),  float(h.beta2),        float(1 - h.beta2),
            float(h.eps), float(h.weight_decay), float(h.momentum)};
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& buffer, float& square_avg) const {
    g = g + weight_decay * w;
    square_avg = alpha * square_avg + one_minus_alpha * (g * g);
    buffer = momentum * buffer + g / (sqrtf(square_avg) + eps);
    w = w - lr * buffer;
  }
};

struct PlainRMSprop {
  static constexpr int kStates = 1, kSquares = 0;  // square_avg
  float lr, alpha, one_minus_alpha, eps, weight_decay;

  static AMP_MP_BOTH PlainRMSprop at(const Hyper& h, const Clock&) {
    return {float(h.lr), float(h.beta2), float(1 - h.beta2), float(h.eps), float(h.weight_decay)};
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& square_avg) const {
    g = g + weight_decay * w;
    square_avg = alpha * square_avg + one_minus_alpha * (g * g);
    w = w - lr * (g / (sqrtf(square_avg) + eps));
  }
};

// Graves, "Generating sequences with recurrent neural networks" (2013): the variance in place of
// the square. torch keeps a momentum buffer only with momentum; here it is one rule.
struct CenteredRMSprop {
  static constexpr int kStates = 3, kSquares = 1;  // momentum_buffer, square_avg, grad_avg
  float lr, alpha, one_minus_alpha, eps, weight_decay, momentum;

  static AMP_MP_BOTH CenteredRMSprop at(const Hyper& h, const Clock&) {
    return {float(h.lr),  float(h.beta2),        float(1 - h.beta2),
            float(h.eps), float(h.weight_decay), float(h.momentum)};
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& buffer, float& square_avg,
                              float& grad_avg) const {
    g = g + weight_decay * w;
    square_avg = alpha * square_avg + one_minus_alpha * (g * g);
    grad_avg = alpha * grad_avg + one_minus_alpha * g;
    buffer = momentum * buffer + g / (sqrtf(square_avg - grad_avg * grad_avg) + eps);
    w = w - lr * buffer;
  }
};

// Chen et al., "Symbolic discovery of optimization algorithms" (2023), algorithm 2.
struct Lion {
  static constexpr int kStates = 1, kSquares = -1;  // exp_avg
  float lr, beta1, one_minus_beta1, beta2, one_minus_beta2, decay;

  static AMP_MP_BOTH Lion at(const Hyper& h, const Clock&) {
    return {float(h.lr),    float(h.beta1),     float(1 - h.beta1),
            float(h.beta2), float(1 - h.beta2), float(1 - h.lr * h.weight_decay)};
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& m) const {
    const float c = beta1 * m + one_minus_beta1 * g;
    const float sign = c > 0 ? 1.0f : c < 0 ? -1.0f : c;  // 0 and NaN stay
    m = beta2 * m + one_minus_beta2 * g;
    w = decay * w - lr * sign;
  }
};

}  // namespace amp_mp
