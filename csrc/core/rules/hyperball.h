#pragma once
// Hyperball, which keeps the Frobenius norm of a weight in place of weight decay: the last part of
// AdamH (layerwise.h) and MuonH (muon.h).
#include "core/rules/base.h"

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

}  // namespace amp_mp
