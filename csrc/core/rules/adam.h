#pragma once
// Adam and AdamW, their AMSGrad forms, NAdam and RAdam. Longer than other files because these are
// read side by side.
#include "core/log2.h"
#include "core/rules/base.h"

namespace amp_mp {

// The two moments of Adam, AdamW and LAMB: exponential averages of the gradient and its square.
struct AdamMoments {
  static constexpr States kKept = {{"exp_avg", Kind::moment}, {"exp_avg_sq", Kind::square}};
  static constexpr Numbers kNumbers = {"lr", kBeta1, kBeta2, "eps", "weight_decay"};
  float beta1, one_minus_beta1, beta2, one_minus_beta2;

  static AMP_MP_BOTH AdamMoments at(const Hyper& h) {
    return {.beta1 = float(h.beta1),
            .one_minus_beta1 = float(h.grad_averaging ? 1 - h.beta1 : 1.0),
            .beta2 = float(h.beta2),
            .one_minus_beta2 = float(1 - h.beta2)};
  }

  AMP_MP_BOTH void update(float g, float& m, float& v) const {
    // update the first moment (momentum)
    m = beta1 * m + one_minus_beta1 * g;
    // update the second moment (RMSprop)
    v = beta2 * v + (one_minus_beta2 * g) * g;
  }
};

// Kingma & Ba, "Adam: a method for stochastic optimization" (2015), algorithm 1, with torch's L2
// penalty. States: m = exp_avg, v = exp_avg_sq.
struct Adam {
  static constexpr States kKept = AdamMoments::kKept;
  static constexpr Numbers kNumbers = AdamMoments::kNumbers.with("bias_correction");
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
    g = add_decay(g, weight_decay, w);
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
  static constexpr States kKept = AdamMoments::kKept;
  static constexpr Numbers kNumbers =
      AdamMoments::kNumbers.with("bias_correction").with("cautious");
  AdamMoments average;
  Decay decay;
  float step_size;     // lr / (1 - beta1^t)
  RootDivisor divide;  // its factor is 1 / sqrt(1 - beta2^t)

  static AMP_MP_BOTH AdamW at(const Hyper& h, const Clock& c) {
    return {.average = AdamMoments::at(h),
            .decay = Decay::at(h),
            .step_size = float(h.lr / (1 - c.beta1_power)),
            .divide = {float(1 / sqrt(1 - c.beta2_power)), float(h.eps)}};
  }

  AMP_MP_BOTH Fraction moments(float g, float, float& m, float& v) const {
    average.update(g, m, v);
    return {m, v};
  }

  AMP_MP_BOTH void take(float quotient, float& w, float&, float&) const {
    // decay the weight and take the step
    w = decay(quotient, w) * w - step_size * quotient;
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
  static constexpr States kKept = Base::kKept.with({"max_exp_avg_sq", Kind::exact, true});
  static constexpr Numbers kNumbers = Base::kNumbers;
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

// Dozat, "Incorporating Nesterov momentum into Adam" (2016), in torch's form: the momentum grows
// with the steps. torch's momentum_decay is `momentum` here, the product of all mu so far is
// Clock::own. States: m = exp_avg, v = exp_avg_sq.
struct NAdam {
  static constexpr States kKept = AdamMoments::kKept;
  static constexpr Numbers kNumbers = AdamMoments::kNumbers.with("cautious")
                                          .with({"decoupled_weight_decay", "decoupled"})
                                          .with({"momentum_decay", "momentum"});
  static constexpr OwnNumber kOwn = {"mu_product", 1};
  AdamMoments average;
  float weight_decay;                // 0 if decoupled
  Decay decay;                       // 1 if not decoupled
  float gradient_part, moment_part;  // of the step: the rate and the bias corrections are in them
  RootDivisor divide;                // its factor is 1 / sqrt(1 - beta2^t)

  // beta1 (1 - 0.96^(step momentum_decay) / 2)
  static AMP_MP_BOTH double mu(const Hyper& h, double step) {
    constexpr double kLog2 = -0.058893689053568565;  // of 0.96
    return h.beta1 * (1 - 0.5 * exp2_of(step * h.momentum * kLog2));
  }

  static AMP_MP_BOTH NAdam at(const Hyper& h, Clock& c) {
    const double now = mu(h, c.step), next = mu(h, c.step + 1);
    c.own *= now;
    return {.average = AdamMoments::at(h),
            .weight_decay = float(h.decoupled ? 0.0 : h.weight_decay),
            .decay = h.decoupled ? Decay::at(h) : Decay{1, 1},
            .gradient_part = float(h.lr * (1 - now) / (1 - c.own)),
            .moment_part = float(h.lr * next / (1 - c.own * next)),
            .divide = {float(1 / sqrt(1 - c.beta2_power)), float(h.eps)}};
  }

  AMP_MP_BOTH Fraction moments(float g, float w, float& m, float& v) const {
    // add the gradient of the L2 penalty
    g = add_decay(g, weight_decay, w);
    average.update(g, m, v);
    // look ahead: this step's gradient, and the momentum of the next
    return {gradient_part * g + moment_part * m, v};
  }

  AMP_MP_BOTH void take(float quotient, float& w, float&, float&) const {
    // decay the weight and take the step
    w = decay(quotient, w) * w - quotient;
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& m, float& v) const {
    take(divide(moments(g, w, m, v)), w, m, v);
  }
};

// Liu et al., "On the variance of the adaptive learning rate and beyond" (2020), algorithm 2, in
// torch's form: eps is added to the root before its bias is corrected. While rho_t, the length of
// the average that v is, does not exceed 5, the step is that of the momentum alone. States:
// m = exp_avg, v = exp_avg_sq.
struct RAdam {
  static constexpr States kKept = AdamMoments::kKept;
  static constexpr Numbers kNumbers =
      AdamMoments::kNumbers.with("cautious").with({"decoupled_weight_decay", "decoupled"});
  AdamMoments average;
  float weight_decay;  // 0 if decoupled
  Decay decay;         // 1 if not decoupled
  float step_size;     // lr / (1 - beta1^t); if it rectifies, times that and v's bias correction
  bool rectifies;
  RootDivisor divide;

  static AMP_MP_BOTH RAdam at(const Hyper& h, const Clock& c) {
    const double bias2 = 1 - c.beta2_power, longest = 2 / (1 - h.beta2) - 1,
                 length = longest - 2 * c.step * c.beta2_power / bias2;
    const bool rectifies = length > 5;
    double rate = h.lr / (1 - c.beta1_power);
    if (rectifies)
      rate *=
          sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)) *
          sqrt(bias2);
    return {.average = AdamMoments::at(h),
            .weight_decay = float(h.decoupled ? 0.0 : h.weight_decay),
            .decay = h.decoupled ? Decay::at(h) : Decay{1, 1},
            .step_size = float(rate),
            .rectifies = rectifies,
            .divide = {1, float(h.eps)}};
  }

  AMP_MP_BOTH Fraction moments(float g, float w, float& m, float& v) const {
    // add the gradient of the L2 penalty
    g = add_decay(g, weight_decay, w);
    average.update(g, m, v);
    return {m, v};
  }

  AMP_MP_BOTH void take(float quotient, float& w, float& m, float&) const {
    // decay the weight and take the step
    const float update = select(rectifies, quotient, m);
    w = decay(update, w) * w - step_size * update;
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& m, float& v) const {
    take(divide(moments(g, w, m, v)), w, m, v);
  }
};

}  // namespace amp_mp

// The list of this family: struct, operator name.
#define AMP_MP_RULES_OF_adam(X)   \
  X(AdamW, adamw_)                \
  X(AmsgradAdamW, amsgrad_adamw_) \
  X(Adam, adam_)                  \
  X(AmsgradAdam, amsgrad_adam_)   \
  X(NAdam, nadam_)                \
  X(RAdam, radam_)
