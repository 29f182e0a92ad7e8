#pragma once
// Adam and AdamW, and their AMSGrad forms.
#include "core/rules/base.h"

namespace amp_mp {

// The two moments of Adam, AdamW and LAMB: exponential averages of the gradient and its square.
struct AdamMoments {
  float beta1, one_minus_beta1, beta2, one_minus_beta2;

  static AMP_MP_BOTH AdamMoments at(const Hyper& h) {
    return {.beta1 = float(h.beta1),
            .one_minus_beta1 = float(1 - h.beta1),
            .beta2 = float(h.beta2),
            .one_minus_beta2 = float(1 - h.beta2)};
  }

  AMP_MP_BOTH void update(float g, float& m, float& v) const {
    // update the first moment (momentum)
    m = beta1 * m + one_minus_beta1 * g;
    // update the second moment (RMSprop)
    v = beta2 * v + one_minus_beta2 * (g * g);
  }
};

// Kingma & Ba, "Adam: a method for stochastic optimization" (2015), algorithm 1, with torch's L2
// penalty. States: m = exp_avg, v = exp_avg_sq.
struct Adam {
  static constexpr int kStates = 2, kSquares = 1;
  AdamMoments average;
  float weight_decay;
  float step_size;     // lr / (1 - beta1^t): the first moment's bias correction is in it
  RootDivisor divide;  // its factor, 1 / sqrt(1 - beta2^t), corrects the second moment's

  static AMP_MP_BOTH Adam at(const Hyper& h, const Clock& c) {
    return {.average = AdamMoments::at(h),
            .weight_decay = float(h.weight_decay),
            .step_size = float(h.lr / (1 - c.beta1_power)),
            .divide = {float(1 / sqrt(1 - c.beta2_power)), float(h.eps)}};
  }

  AMP_MP_BOTH Fraction moments(float g, float w, float& m, float& v) const {
    // add the gradient of the L2 penalty
    g = g + weight_decay * w;
    average.update(g, m, v);
    return {m, v};
  }

  AMP_MP_BOTH void take(float quotient, float& w, float&, float&) const {
    // take the step
    w = w - step_size * quotient;
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& m, float& v) const {
    take(divide(moments(g, w, m, v)), w, m, v);
  }
};

// Loshchilov & Hutter, "Decoupled weight decay regularization" (2019), algorithm 2; as in torch,
// the decay is multiplied by lr. States: m = exp_avg, v = exp_avg_sq.
struct AdamW {
  static constexpr int kStates = 2, kSquares = 1;
  AdamMoments average;
  float decay;         // 1 - lr * weight_decay
  float step_size;     // lr / (1 - beta1^t)
  RootDivisor divide;  // its factor is 1 / sqrt(1 - beta2^t)

  static AMP_MP_BOTH AdamW at(const Hyper& h, const Clock& c) {
    return {.average = AdamMoments::at(h),
            .decay = float(1 - h.lr * h.weight_decay),
            .step_size = float(h.lr / (1 - c.beta1_power)),
            .divide = {float(1 / sqrt(1 - c.beta2_power)), float(h.eps)}};
  }

  AMP_MP_BOTH Fraction moments(float g, float, float& m, float& v) const {
    average.update(g, m, v);
    return {m, v};
  }

  AMP_MP_BOTH void take(float quotient, float& w, float&, float&) const {
    // decay the weight and take the step
    w = decay * w - step_size * quotient;
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& m, float& v) const {
    take(divide(moments(g, w, m, v)), w, m, v);
  }
};

// Reddi, Kale & Kumar, "On the convergence of Adam and beyond" (2018), in torch's form: the update
// divides by the root of the largest second moment so far. States: m = exp_avg, v = exp_avg_sq,
// largest = max_exp_avg_sq.
template <class Base>
struct Amsgrad {
  static constexpr int kStates = 3, kSquares = 1;
  Base base;
  RootDivisor divide;

  static AMP_MP_BOTH Amsgrad at(const Hyper& h, const Clock& c) {
    const Base base = Base::at(h, c);
    return {.base = base, .divide = base.divide};
  }

  AMP_MP_BOTH Fraction moments(float g, float w, float& m, float& v, float& largest) const {
    base.moments(g, w, m, v);
    // keep the maximum; a NaN counts as the largest
    largest = v > largest || v != v ? v : largest;
    return {m, largest};
  }

  AMP_MP_BOTH void take(float quotient, float& w, float& m, float& v, float&) const {
    base.take(quotient, w, m, v);
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& m, float& v, float& largest) const {
    take(divide(moments(g, w, m, v, largest)), w, m, v, largest);
  }
};
using AmsgradAdam = Amsgrad<Adam>;
using AmsgradAdamW = Amsgrad<AdamW>;

}  // namespace amp_mp
