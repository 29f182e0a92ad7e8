#pragma once
// Muon, whose update is a whole matrix: a momentum, made orthogonal by matrix products.
#include "core/rules/hyperball.h"

namespace amp_mp {

// The second half of Muon's step: w is decayed and moved along the orthogonal matrix `o`.
struct MuonStep {
  static constexpr States kKept = {};
  Decay decay;
  float rate;  // lr times the factor of the matrix' shape

  AMP_MP_BOTH void operator()(float o, float& w) const { w = w * decay(o, w) - rate * o; }
};

// The first half: the momentum, and the direction that others make orthogonal.
struct MuonMomentum {
  static constexpr States kKept = {{"momentum_buffer", Kind::matrix_moment}};
  static constexpr Numbers kNumbers = {"lr", "momentum", "nesterov"};
  float momentum, gain;  // gain: 1 - momentum
  bool nesterov;

  static AMP_MP_BOTH MuonMomentum at(const Hyper& h) {
    return {.momentum = float(h.momentum), .gain = float(1 - h.momentum), .nesterov = h.nesterov};
  }

  // Returns the direction.
  AMP_MP_BOTH float advance(float g, float& m) const {
    // move the momentum towards the gradient
    m = towards(g, m);
    // look ahead by as much again
    return select(nesterov, towards(g, m), m);
  }

  // momentum m + (1 - momentum) g from the nearer end, as torch.lerp: with momentum 0 it is g.
  AMP_MP_BOTH float towards(float g, float m) const {
    return select(gain < .5f, m + gain * (g - m), g - momentum * (g - m));
  }
};

// Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024), in torch's form.
// It takes two passes: `advance` over all elements, which stores the direction; then, when others
// have made each matrix of directions orthogonal, `step` with the result in the gradient's place.
// States: m = momentum_buffer, and the direction, bfloat16, which lives for one step.
struct Muon {
  static constexpr States kKept = MuonMomentum::kKept;
  static constexpr Numbers kNumbers = MuonMomentum::kNumbers.with("weight_decay").with("cautious");
  static constexpr bool kDirection = true;
  MuonMomentum average;
  MuonStep step;

  static AMP_MP_BOTH Muon at(const Hyper& h, const Clock&) {
    return {.average = MuonMomentum::at(h),
            .step = {.decay = Decay::at(h), .rate = float(h.lr * h.trust)}};
  }

  AMP_MP_BOTH float advance(float g, float& m) const { return average.advance(g, m); }
};

// Muon on a sphere (core/rules/hyperball.h). States as Muon's.
struct MuonH {
  static constexpr States kKept = MuonMomentum::kKept;
  static constexpr Numbers kNumbers = MuonMomentum::kNumbers;
  static constexpr OwnNumber kOwn = Hyperball::kOwn;
  static constexpr bool kDirection = true, kUpdateNorm = true;
  MuonMomentum average;
  Hyperball step;

  static AMP_MP_BOTH MuonH at(const Hyper& h, Clock& c, const Norms& n) {
    return {.average = MuonMomentum::at(h), .step = Hyperball::at(h, c, n)};
  }

  AMP_MP_BOTH float advance(float g, float& m) const { return average.advance(g, m); }
};

}  // namespace amp_mp

// The list of this family: struct, operator name.
#define AMP_MP_RULES_OF_muon(X) \
  X(Muon, muon_)                \
  X(MuonH, muonh_)
