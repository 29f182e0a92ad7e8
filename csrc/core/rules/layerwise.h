#pragma once
// Rules that look at a whole tensor's norms.
#include "core/rules/base.h"

namespace amp_mp {

// You et al., "Large batch optimization for deep learning: training BERT in 76 minutes" (2020),
// algorithm 2, phi being the identity. Two passes: `moments` over everything, whose `direction` is
// measured, then the update by it.
struct LAMB {
  static constexpr int kStates = 2, kSquares = 1;  // exp_avg, exp_avg_sq
  static constexpr bool kNorms = true, kUpdateNorm = true;
  float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, weight_decay, inv_bias1,
      inv_bias2_root, step_size;

  static AMP_MP_BOTH LAMB at(const Hyper& h, const Clock& c, const Norms& n) {
    const bool adapts = n.weight > 0 && n.update > 0 && (h.always_adapt || h.weight_decay != 0);
    return {float(h.beta1),
            float(1 - h.beta1),
            float(h.beta2),
            float(1 - h.beta2),
            float(h.eps),
            float(h.weight_decay),
            float(1 / (1 - c.beta1_power)),
            float(1 / sqrt(1 - c.beta2_power)),
            float(h.lr * (adapts ? n.weight / n.update : 1.0))};
  }

  AMP_MP_BOTH void moments(float g, float, float& m, float& v) const {
    m = beta1 * m + one_minus_beta1 * g;
    v = beta2 * v + one_minus_beta2 * (g * g);
  }

  AMP_MP_BOTH float direction(float w, float m, float v) const {
    return m * inv_bias1 / (sqrtf(v) * inv_bias2_root + eps) + weight_decay * w;
  }

  AMP_MP_BOTH void operator()(float, float& w, float m, float v) const {
    w = w - step_size * direction(w, m, v);
  }
};

// Ginsburg et al., "Stochastic gradient methods with layer-wise adaptive moments" (2019), algorithm
// 1: one second moment a tensor, its gradient's squared norm averaged. It lives in the clock.
// Averaging the gradient too (dampening = beta1) is NVIDIA's variant.
struct NovoGrad {
  static constexpr int kStates = 1, kSquares = -1;  // exp_avg
  static constexpr bool kNorms = true;
  float lr, beta1, gain, inv_root, weight_decay;

  static AMP_MP_BOTH NovoGrad at(const Hyper& h, Clock& c, const Norms& n) {
    const double square = n.grad * n.grad;
    c.layer = c.step == 1 ? square : h.beta2 * c.layer + (1 - h.beta2) * square;
    return {float(h.lr), float(h.beta1), float(1 - h.dampening), float(1 / (sqrt(c.layer) + h.eps)),
            float(h.weight_decay)};
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& m) const {
    m = beta1 * m + gain * (g * inv_root + weight_decay * w);
    w = w - lr * m;
  }
};

}  // namespace amp_mp
