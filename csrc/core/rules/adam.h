#pragma once
// Adam and AdamW, and their AMSGrad forms.
#include "core/rules/base.h"

namespace amp_mp {

// Kingma & Ba, "Adam: a method for stochastic optimization" (2015), algorithm 1.
struct Adam {
  static constexpr int kStates = 2, kSquares = 1;  // exp_avg, exp_avg_sq
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

  AMP_MP_BOTH void moments(float g, float w, float& m, float& v) const {
    g = g + weight_decay * w;
    m = beta1 * m + one_minus_beta1 * g;
    v = beta2 * v + one_minus_beta2 * (g * g);
  }

  AMP_MP_BOTH void update(float& w, float m, float v) const {
    w = w - step_size * (m / (sqrtf(v) * inv_bias2_root + eps));
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& m, float& v) const {
    moments(g, w, m, v);
    update(w, m, v);
  }
};

// Loshchilov & Hutter, "Decoupled weight decay regularization" (2019), algorithm 2; the decay is
// multiplied by lr, as in torch.
struct AdamW {
  static constexpr int kStates = 2, kSquares = 1;  // exp_avg, exp_avg_sq
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

  AMP_MP_BOTH void moments(float g, float, float& m, float& v) const {
    m = beta1 * m + one_minus_beta1 * g;
    v = beta2 * v + one_minus_beta2 * (g * g);
  }

  AMP_MP_BOTH void update(float& w, float m, float v) const {
    w = decay * w - step_size * (m / (sqrtf(v) * inv_bias2_root + eps));
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& m, float& v) const {
    moments(g, w, m, v);
    update(w, m, v);
  }
};

// Reddi, Kale & Kumar, "On the convergence of Adam and beyond" (2018), as torch has it: the largest
// second moment so far takes the place of the second moment.
template <class Base>
struct Amsgrad {
  static constexpr int kStates = 3, kSquares = 1;  // exp_avg, exp_avg_sq, max_exp_avg_sq
  Base base;

  static AMP_MP_BOTH Amsgrad at(const Hyper& h, const Clock& c) { return {Base::at(h, c)}; }

  AMP_MP_BOTH void operator()(float g, float& w, float& m, float& v, float& largest) const {
    base.moments(g, w, m, v);
    largest = v > largest || v != v ? v : largest;  // a NaN is the largest
    base.update(w, m, largest);
  }
};
using AmsgradAdam = Amsgrad<Adam>;
using AmsgradAdamW = Amsgrad<AdamW>;

}  // namespace amp_mp
