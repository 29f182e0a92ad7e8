#pragma once
// The update rules, as the papers write them: one element, float32, for CPU and CUDA alike.
//
// A rule is its constants, made once a step from the user's numbers: `at` computes in double and
// rounds once to float (1 - beta in float would be off by 1.3e-5 at beta = .999). Its call operator
// takes the true gradient g (already unscaled and clipped; negated for maximize), the float32
// weight w and the states, all updated in place. The expressions are compared bit for bit with
// NumPy: do not regroup them, and never let a compiler fuse a multiplication with an addition.
#include <cmath>
#include <cstdint>

#include "core/macros.h"

namespace amp_mp {

// The numbers of one param_group. A rule reads those it knows.
struct Hyper {
  double lr, beta1, beta2, eps, weight_decay, momentum, dampening, lr_decay;
  bool nesterov, maximize;
};

// How far one parameter has come. Lives in the optimizer's state, advances on applied steps only.
// The powers are running products: no pow(), and the same bits on every device.
struct Clock {
  double step, beta1_power, beta2_power;

  AMP_MP_BOTH void tick(const Hyper& h) {
    step += 1;
    beta1_power *= h.beta1;
    beta2_power *= h.beta2;
  }
};

// Kingma & Ba, "Adam: a method for stochastic optimization" (2015), algorithm 1.
struct Adam {
  static constexpr int kStates = 2;  // exp_avg, exp_avg_sq
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, step_size,
      inv_bias2_root;

  static AMP_MP_BOTH Adam at(const Hyper& h, const Clock& c) {
    return {float(h.beta1),
            float(1 - h.beta1),
            float(h.beta2),
            float(1 - h.beta2),
            float(h.eps),
            float(h.weight_decay),
            float(h.lr / (1 - c.beta1_power)),
            float(1 / sqrt(1 - c.beta2_power))};
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& m, float& v) const {
    g = g + weight_decay * w;
    m = beta1 * m + one_minus_beta1 * g;
    v = beta2 * v + one_minus_beta2 * (g * g);
    w = w - step_size * (m / (sqrtf(v) * inv_bias2_root + eps));
  }
};

// Loshchilov & Hutter, "Decoupled weight decay regularization" (2019), algorithm 2; the decay is
// multiplied by lr, as in torch.
struct AdamW {
  static constexpr int kStates = 2;  // exp_avg, exp_avg_sq
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, step_size, inv_bias2_root;

  static AMP_MP_BOTH AdamW at(const Hyper& h, const Clock& c) {
    return {float(h.beta1),
            float(1 - h.beta1),
            float(h.beta2),
            float(1 - h.beta2),
            float(h.eps),
            float(1 - h.lr * h.weight_decay),
            float(h.lr / (1 - c.beta1_power)),
            float(1 / sqrt(1 - c.beta2_power))};
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& m, float& v) const {
    m = beta1 * m + one_minus_beta1 * g;
    v = beta2 * v + one_minus_beta2 * (g * g);
    w = decay * w - step_size * (m / (sqrtf(v) * inv_bias2_root + eps));
  }
};

// Sutskever et al., "On the importance of initialization and momentum" (2013), in torch's form: the
// learning rate stays outside the buffer. The first step fills the buffer with the gradient alone.
struct SGD {
  static constexpr int kStates = 1;  // momentum_buffer
  float lr, weight_decay, momentum, gain;
  bool nesterov;

  static AMP_MP_BOTH SGD at(const Hyper& h, const Clock& c) {
    const double gain = c.step == 1 ? 1.0 : 1 - h.dampening;
    return {float(h.lr), float(h.weight_decay), float(h.momentum), float(gain), h.nesterov};
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& buffer) const {
    g = g + weight_decay * w;
    buffer = momentum * buffer + gain * g;
    w = w - lr * (nesterov ? g + momentum * buffer : buffer);
  }
};

// The classic form, Caffe's: the learning rate is inside the buffer, which so remembers the rate of
// each of its gradients. In low precision lr g may vanish where g does not.
struct ScaledSGD {
  static constexpr int kStates = 1;  // momentum_buffer
  float lr, weight_decay, momentum;
  bool nesterov;

  static AMP_MP_BOTH ScaledSGD at(const Hyper& h, const Clock&) {
    return {float(h.lr), float(h.weight_decay), float(h.momentum), h.nesterov};
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& buffer) const {
    g = g + weight_decay * w;
    buffer = momentum * buffer + lr * g;
    w = w - (nesterov ? lr * g + momentum * buffer : buffer);
  }
};

// SGD without momentum keeps no buffer.
struct PlainSGD {
  static constexpr int kStates = 0;
  float lr, weight_decay;

  static AMP_MP_BOTH PlainSGD at(const Hyper& h, const Clock&) {
    return {float(h.lr), float(h.weight_decay)};
  }

  AMP_MP_BOTH void operator()(float g, float& w) const {
    g = g + weight_decay * w;
    w = w - lr * g;
  }
};

// Duchi, Hazan & Singer, "Adaptive subgradient methods" (2011), in torch's form.
struct Adagrad {
  static constexpr int kStates = 1;  // sum
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
  static constexpr int kStates = 2;  // square_avg, momentum_buffer
  float lr, alpha, one_minus_alpha, eps, weight_decay, momentum;

  static AMP_MP_BOTH RMSprop at(const Hyper& h, const Clock&) {
    return {float(h.lr),  float(h.beta2),        float(1 - h.beta2),
            float(h.eps), float(h.weight_decay), float(h.momentum)};
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& square_avg, float& buffer) const {
    g = g + weight_decay * w;
    square_avg = alpha * square_avg + one_minus_alpha * (g * g);
    buffer = momentum * buffer + g / (sqrtf(square_avg) + eps);
    w = w - lr * buffer;
  }
};

struct PlainRMSprop {
  static constexpr int kStates = 1;  // square_avg
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

// Chen et al., "Symbolic discovery of optimization algorithms" (2023), algorithm 2.
struct Lion {
  static constexpr int kStates = 1;  // exp_avg
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

// The rule list: struct, operator name. A new optimizer is a struct above and a line here.
#define AMP_MP_FOR_EACH_RULE(X)   \
  X(AdamW, adamw_)                \
  X(Adam, adam_)                  \
  X(SGD, sgd_)                    \
  X(ScaledSGD, scaled_sgd_)       \
  X(PlainSGD, plain_sgd_)         \
  X(Adagrad, adagrad_)            \
  X(RMSprop, rmsprop_)            \
  X(PlainRMSprop, plain_rmsprop_) \
  X(Lion, lion_)

constexpr int kMaxStates = 2;

}  // namespace amp_mp
