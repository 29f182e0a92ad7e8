#pragma once
// LAMB, NovoGrad and AdamH, whose steps depend on the norms of whole tensors. (LARS is in sgd.h.)
#include "core/rules/adam.h"
#include "core/rules/hyperball.h"

namespace amp_mp {

// You et al., "Large batch optimization for deep learning: training BERT in 76 minutes" (2020),
// algorithm 2 with the identity for phi. It takes two passes: `moments` over all elements, which
// also measures the norm of `direction`; then the call operator, with that norm in step_size.
// States: m = exp_avg, v = exp_avg_sq.
struct LAMB {
  static constexpr States kKept = AdamMoments::kKept;
  static constexpr Numbers kNumbers = AdamW::kNumbers.with("always_adapt")
                                          .with({"use_nvlamb", "always_adapt"})
                                          .with("grad_averaging")
                                          .with("adam_w_mode");
  static constexpr bool kUpdateNorm = true;
  AdamMoments average;
  float eps;
  float penalty;  // weight_decay of the L2 penalty, 0 if it is decoupled
  Decay decay;    // the weight's part of the direction: weight_decay, or 0 where it is cautious
  float inv_bias1, inv_bias2_root;  // 1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t)
  float step_size;                  // lr |w| / |direction|

  static AMP_MP_BOTH LAMB at(const Hyper& h, const Clock& c, const Norms& n) {
    const bool adapts = n.weight > 0 && n.update > 0 && (h.always_adapt || h.weight_decay != 0);
    const auto decoupled = float(h.adam_w_mode ? h.weight_decay : 0.0);
    return {.average = AdamMoments::at(h),
            .eps = float(h.eps),
            .penalty = float(h.adam_w_mode ? 0.0 : h.weight_decay),
            .decay = {decoupled, h.cautious ? 0.0f : decoupled},
            .inv_bias1 = float(1 / (1 - c.beta1_power)),
            .inv_bias2_root = float(1 / sqrt(1 - c.beta2_power)),
            .step_size = float(h.lr * (adapts ? n.weight / n.update : 1.0))};
  }

  AMP_MP_BOTH void moments(float g, float w, float& m, float& v) const {
    // add the gradient of the L2 penalty
    average.update(add_decay(g, penalty, w), m, v);
  }

  AMP_MP_BOTH float direction(float w, float m, float v) const {
    // Adam's update with both biases corrected, plus the decoupled weight decay
    const float update = m * inv_bias1 / (sqrtf(v) * inv_bias2_root + eps);
    return add_decay(update, decay(update, w), w);
  }

  AMP_MP_BOTH void operator()(float, float& w, float m, float v) const {
    // take the step
    w = w - step_size * direction(w, m, v);
  }
};

// Ginsburg et al., "Stochastic gradient methods with layer-wise adaptive moments" (2019), algorithm
// 1. Its second moment is one number for each tensor, the average of the gradient's squared norm,
// kept in Clock::own. `dampening` = beta1 averages the gradient too, as NVIDIA's code does; so are
// bias correction and the form outside of the moment NVIDIA's. State: m = exp_avg.
struct NovoGrad {
  static constexpr States kKept = {{"exp_avg", Kind::moment}};
  static constexpr Numbers kNumbers =
      Adam::kNumbers.with("reg_inside_moment").with({"betas[0]", "dampening", "grad_averaging"});
  static constexpr OwnNumber kOwn = {"layer", 0};
  static constexpr bool kNorms = true;
  float step_size;  // lr / (1 - beta1^t)
  float beta1;
  float gain;      // 1 - dampening
  float inv_root;  // 1 / (sqrt(second moment) / sqrt(1 - beta2^t) + eps)
  float weight_decay;
  float shrink;  // lr weight_decay
  bool inside;   // whether the first moment is that of what the step takes

  static AMP_MP_BOTH NovoGrad at(const Hyper& h, Clock& c, const Norms& n) {
    // update the tensor's second moment; the first step starts it where nothing has
    const double square = n.grad * n.grad;
    const bool starts = c.step == 1 && c.own == 0;
    c.own = starts ? square : h.beta2 * c.own + (1 - h.beta2) * square;
    return {.step_size = float(h.lr / (1 - c.beta1_power)),
            .beta1 = float(h.beta1),
            .gain = float(1 - h.dampening),
            .inv_root = float(1 / (sqrt(c.own / (1 - c.beta2_power)) + h.eps)),
            .weight_decay = float(h.weight_decay),
            .shrink = float(h.lr * h.weight_decay),
            .inside = h.reg_inside_moment};
  }

  AMP_MP_BOTH void operator()(float g, float& w, float& m) const {
    if (inside) {
      // normalise the gradient, add the weight decay, update the first moment
      m = beta1 * m + gain * add_decay(g * inv_root, weight_decay, w);
      // take the step
      w = w - step_size * m;
    } else {
      // update the first moment of the gradient
      m = beta1 * m + gain * g;
      // take the normalised step, with decoupled weight decay
      w = add_decay(w - step_size * (m * inv_root), -shrink, w);
    }
  }
};

// Adam on a sphere (hyperball.h). States: m = exp_avg, v = exp_avg_sq.
struct AdamH {
  static constexpr States kKept = AdamMoments::kKept;
  static constexpr Numbers kNumbers = {"lr", kBeta1, kBeta2, "eps", "bias_correction"};
  static constexpr OwnNumber kOwn = Hyperball::kOwn;
  static constexpr bool kUpdateNorm = true;
  AdamMoments average;
  RootDivisor quotient;  // its factor is 1 / sqrt(1 - beta2^t)
  Hyperball step;

  static AMP_MP_BOTH AdamH at(const Hyper& h, Clock& c, const Norms& n) {
    return {.average = AdamMoments::at(h),
            .quotient = {float(1 / sqrt(1 - c.beta2_power)), float(h.eps)},
            .step = Hyperball::at(h, c, n)};
  }

  AMP_MP_BOTH void moments(float g, float, float& m, float& v) const { average.update(g, m, v); }

  // Adam's update but for 1 / (1 - beta1^t), which its norm would take away again.
  AMP_MP_BOTH float direction(float, float m, float v) const { return quotient({m, v}); }

  AMP_MP_BOTH void operator()(float, float& w, float m, float v) const {
    step(direction(w, m, v), w);
  }
};

}  // namespace amp_mp

// The list of this family: struct, operator name.
#define AMP_MP_RULES_OF_layerwise(X) \
  X(LAMB, lamb_)                     \
  X(NovoGrad, novograd_)             \
  X(AdamH, adamh_)
