#pragma once
// Gradient descent, with two forms of momentum, and LARS, which gives each tensor its own rate.
#include "core/rules/base.h"

namespace amp_mp {

// Sutskever et al., "On the importance of initialization and momentum" (2013), in torch's form: the
// buffer does not contain the learning rate. The first step fills it with the gradient, undamped.
// State: buffer = momentum_buffer.
struct SGD {
  static constexpr States kKept = {{"momentum_buffer", Kind::moment, true}};
  static constexpr Numbers kNumbers = {"lr",
                                       "momentum",
                                       "weight_decay",
                                       "nesterov",
                                       {"dampening", nullptr, "momentum"},
                                       {"wd_after_momentum", "decoupled"}};
  float lr, weight_decay, momentum;
  float gain;    // 1 - dampening; 1 in the first step
  float shrink;  // 1 - lr weight_decay if that is decoupled, else 1
  bool nesterov;

  static AMP_MP_BOTH SGD at(const Hyper& h, const Clock& c) {
    const double gain = c.step == 1 ? 1.0 : 1 - h.dampening;
    return {.lr = float(h.lr),
            .weight_decay = float(h.decoupled ? 0.0 : h.weight_decay),
            .momentum = float(h.momentum),
            .gain = float(gain),
            .shrink = float(h.decoupled ? 1 - h.lr * h.weight_decay : 1.0),
            .nesterov = h.nesterov};
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& buffer) const {
    // add the gradient of the L2 penalty
    g = add_decay(g, weight_decay, w);
    // update the momentum buffer
    buffer = momentum * buffer + gain * g;
    // decay the weight and take the step
    w = shrink * w - lr * select(nesterov, g + momentum * buffer, buffer);
  }
};

// Caffe's form of momentum: the buffer contains the learning rate, so it remembers the rate at
// which each gradient arrived. In low precision lr * g may underflow where g does not. State:
// buffer = momentum_buffer.
struct ScaledSGD {
  static constexpr States kKept = SGD::kKept;
  static constexpr Numbers kNumbers = SGD::kNumbers;
  float lr, weight_decay, momentum;
  bool nesterov;

  static AMP_MP_BOTH ScaledSGD at(const Hyper& h, const Clock&) {
    return {.lr = float(h.lr),
            .weight_decay = float(h.weight_decay),
            .momentum = float(h.momentum),
            .nesterov = h.nesterov};
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& buffer) const {
    // add the gradient of the L2 penalty
    g = add_decay(g, weight_decay, w);
    // update the momentum buffer
    buffer = momentum * buffer + lr * g;
    // take the step
    w = w - select(nesterov, lr * g + momentum * buffer, buffer);
  }
};

// SGD without momentum keeps no buffer.
struct PlainSGD {
  static constexpr States kKept = {};
  static constexpr Numbers kNumbers = SGD::kNumbers;
  float lr, weight_decay;

  static AMP_MP_BOTH PlainSGD at(const Hyper& h, const Clock&) {
    return {.lr = float(h.lr), .weight_decay = float(h.weight_decay)};
  }

  AMP_MP_BOTH void operator()(float g, float& w) const {
    // add the gradient of the L2 penalty
    g = add_decay(g, weight_decay, w);
    // take the step
    w = w - lr * g;
  }
};

// You, Gitman & Ginsburg, "Large batch training of convolutional networks" (2017), in the form of
// Apex's LARC around torch's SGD: a tensor's decayed gradient is multiplied by
// r = trust |w| / (|g| + weight_decay |w| + eps), or with `clip` by min(r / lr, 1). If a
// norm is zero the gradient is used as it is, without decay, as in LARC. State:
// buffer = momentum_buffer.
struct LARS {
  static constexpr States kKept = {{"momentum_buffer", Kind::moment, true}};
  static constexpr Numbers kNumbers = {
      "lr",       "momentum", "dampening", "weight_decay",
      "nesterov", "clip",     "eps",       {"trust_coefficient", "trust"}};
  static constexpr bool kNorms = true;
  float lr, weight_decay, ratio, momentum;
  float gain;  // 1 - dampening; 1 in the first step
  bool nesterov;

  static AMP_MP_BOTH LARS at(const Hyper& h, const Clock& c, const Norms& n) {
    const bool adapts = n.weight > 0 && n.grad > 0;
    double ratio = adapts ? h.trust * n.weight / (n.grad + h.weight_decay * n.weight + h.eps) : 1.0;
    if (adapts && h.clip) ratio = ratio / h.lr < 1 ? ratio / h.lr : 1.0;
    const double gain = c.step == 1 ? 1.0 : 1 - h.dampening;
    return {.lr = float(h.lr),
            .weight_decay = float(adapts ? h.weight_decay : 0.0),
            .ratio = float(ratio),
            .momentum = float(h.momentum),
            .gain = float(gain),
            .nesterov = h.nesterov};
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& buffer) const {
    // add the gradient of the L2 penalty, adapt to the tensor's norms
    g = add_decay(g, weight_decay, w) * ratio;
    // update the momentum buffer
    buffer = momentum * buffer + gain * g;
    // take the step
    w = w - lr * select(nesterov, g + momentum * buffer, buffer);
  }
};

}  // namespace amp_mp

// The list of this family: struct, operator name.
#define AMP_MP_RULES_OF_sgd(X) \
  X(SGD, sgd_)                 \
  X(ScaledSGD, scaled_sgd_)    \
  X(PlainSGD, plain_sgd_)      \
  X(LARS, lars_)
