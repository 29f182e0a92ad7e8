#pragma once
// Hyperball, which keeps the Frobenius norm of a weight in place of weight decay; AdamH. (MuonH is
// in muon.h.)
#include "core/rules/adam.h"

namespace amp_mp {

// Wen et al., "Fantastic pretraining optimizers and where to find them II: hyperball optimization"
// (2026): w is moved by lr radius along the update u, and then put back onto its sphere,
//
//   w' = w - lr radius u / |u|
//   w = radius w' / |w'|
//
// The square of |w'| follows from |w|, |u| and their product, so both lines are one. The radius,
// Clock::own, is |w| before the first step: were it |w| of each step, its roundings would add up.
// As a float it is the same however a tensor is split; sums in double differ in their last bits.
struct Hyperball {
  static constexpr States kKept = {};
  static constexpr OwnNumber kOwn = {"radius", 0, true};
  float keep, rate;  // radius / |w'|, and lr radius / |u| times that

  static AMP_MP_BOTH Hyperball at(const Hyper& h, Clock& c, const Norms& n) {
    if (c.own == 0) c.own = float(n.weight);
    const double radius = c.own, rate = n.update > 0 ? h.lr * radius / n.update : 0,
                 moved = sqrt(n.weight * n.weight - 2 * rate * n.along +
                              rate * rate * (n.update * n.update)),
                 keep = moved > 0 ? radius / moved : 1;
    return {.keep = float(keep), .rate = float(keep * rate)};
  }

  AMP_MP_BOTH void operator()(float u, float& w) const { w = keep * w - rate * u; }
};

// Adam on a sphere. States: m = exp_avg, v = exp_avg_sq.
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
