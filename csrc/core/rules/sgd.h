#pragma once
// Gradient descent, with momentum in two forms, and with a rate for each layer.
#include "core/rules/base.h"

namespace amp_mp {

// Sutskever et al., "On the importance of initialization and momentum" (2013), in torch's form: the
// learning rate stays outside the buffer. The first step fills the buffer with the gradient alone.
struct SGD {
  static constexpr int kStates = 1, kSquares = -1;  // momentum_buffer
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
  static constexpr int kStates = 1, kSquares = -1;  // momentum_buffer
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
  static constexpr int kStates = 0, kSquares = -1;
  float lr, weight_decay;

  static AMP_MP_BOTH PlainSGD at(const Hyper& h, const Clock&) {
    return {float(h.lr), float(h.weight_decay)};
  }

  AMP_MP_BOTH void operator()(float g, float& w) const {
    g = g + weight_decay * w;
    w = w - lr * g;
  }
};

// You, Gitman & Ginsburg, "Large batch training of convolutional networks" (2017), in the form of
// Apex's LARC around torch's SGD: the decayed gradient of a tensor is multiplied by
// trust |w| / (|g| + weight_decay |w| + eps), with `clip` at most so that lr is not exceeded. Where
// a norm is zero the gradient stays as it is, decay included, as there.
struct LARS {
  static constexpr int kStates = 1, kSquares = -1;  // momentum_buffer
  static constexpr bool kNorms = true;
  float lr, weight_decay, ratio, momentum, gain;
  bool nesterov;

  static AMP_MP_BOTH LARS at(const Hyper& h, const Clock& c, const Norms& n) {
    const bool adapts = n.weight > 0 && n.grad > 0;
    double ratio = adapts ? h.trust * n.weight / (n.grad + h.weight_decay * n.weight + h.eps) : 1.0;
    if (adapts && h.clip) ratio = ratio / h.lr < 1 ? ratio / h.lr : 1.0;
    const double gain = c.step == 1 ? 1.0 : 1 - h.dampening;
    return {float(h.lr),  float(adapts ? h.weight_decay : 0.0),
            float(ratio), float(h.momentum),
            float(gain),  h.nesterov};
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& buffer) const {
    g = (g + weight_decay * w) * ratio;
    buffer = momentum * buffer + gain * g;
    w = w - lr * (nesterov ? g + momentum * buffer : buffer);
  }
};

}  // namespace amp_mp
