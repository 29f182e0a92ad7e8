#pragma once
// What every rule is made from: the param_group's numbers, the parameter's clock, its norms.
#include <cmath>
#include <cstdint>

#include "core/formats.h"
#include "core/rules/declared.h"

namespace amp_mp {

// The numbers of one param_group. Each rule reads the ones it uses.
struct Hyper {
  double lr, beta1, beta2, eps, weight_decay, momentum, dampening, lr_decay, trust;
  uint64_t seed;  // of stochastic rounding
  bool nesterov, maximize, clip, always_adapt, decoupled = false;
  bool lr_is_double = false, weight_decay_is_double = false;
  bool bias_correction = true, reg_inside_moment = true;
  bool cautious = false, grad_averaging = true, adam_w_mode = true;
  // Addresses of numbers on the device, or null. A captured step reads them at each replay.
  const void* lr_at = nullptr;
  const void* weight_decay_at = nullptr;
};
static_assert(sizeof(Hyper) == 14 * 8);

// Its members by name, of which rules declare those that they read.
struct HyperMember {
  const char* name;
  double Hyper::* number;
  bool Hyper::* flag = nullptr;
  Range range = Range::any;
};
inline constexpr HyperMember kHyperMembers[] = {
    {"lr", &Hyper::lr, nullptr, Range::not_negative},
    {"beta1", &Hyper::beta1, nullptr, Range::below_one},
    {"beta2", &Hyper::beta2, nullptr, Range::below_one},
    {"eps", &Hyper::eps, nullptr, Range::not_negative},
    {"weight_decay", &Hyper::weight_decay, nullptr, Range::not_negative},
    {"momentum", &Hyper::momentum, nullptr, Range::not_negative},
    {"dampening", &Hyper::dampening},
    {"lr_decay", &Hyper::lr_decay, nullptr, Range::not_negative},
    {"trust", &Hyper::trust, nullptr, Range::not_negative},
    {"nesterov", nullptr, &Hyper::nesterov},
    {"maximize", nullptr, &Hyper::maximize},
    {"clip", nullptr, &Hyper::clip},
    {"always_adapt", nullptr, &Hyper::always_adapt},
    {"decoupled", nullptr, &Hyper::decoupled},
    {"bias_correction", nullptr, &Hyper::bias_correction},
    {"reg_inside_moment", nullptr, &Hyper::reg_inside_moment},
    {"cautious", nullptr, &Hyper::cautious},
    {"grad_averaging", nullptr, &Hyper::grad_averaging},
    {"adam_w_mode", nullptr, &Hyper::adam_w_mode},
};

// One of them; null where there is none of the name.
constexpr const HyperMember* hyper_member(const char* name) {
  for (const HyperMember& member : kHyperMembers)
    if (same_text(member.name, name)) return &member;
  return nullptr;
}

// Replaces a number with its current value on the device, if there is one.
AMP_MP_BOTH void read_number(double& number, const void* at, bool is_double) {
  if (!at) return;
  number = is_double ? *static_cast<const double*>(at) : double(*static_cast<const float*>(at));
}
AMP_MP_BOTH void read_rate(Hyper& h) { read_number(h.lr, h.lr_at, h.lr_is_double); }
AMP_MP_BOTH void read_decay(Hyper& h) {
  read_number(h.weight_decay, h.weight_decay_at, h.weight_decay_is_double);
}

// base^count by squaring: pow() of host and device differ in the last bit. Of a count that is no
// whole number the part before the point counts.
AMP_MP_BOTH double power_of(double base, double count) {
  double power = 1;
  for (uint64_t left = count > 0 ? uint64_t(fmin(count, 0x1p63)) : 0; left > 0; left /= 2) {
    if (left % 2 == 1) power *= base;
    base *= base;
  }
  return power;
}

// The step count of one parameter, kept in the optimizer's state as a float64 tensor. It advances
// on applied steps only, and scripts may write it. The powers of the betas are made of it at each
// step. Without bias correction they are 0: divisions by 1 - beta^t then change nothing.
struct Clock {
  double step, beta1_power, beta2_power;
  double own;  // one number of the rule's own: NovoGrad's second moment, NAdam's mu_product

  AMP_MP_BOTH void tick(const Hyper& h) {
    step += 1;
    beta1_power = h.bias_correction ? power_of(h.beta1, step) : 0;
    beta2_power = h.bias_correction ? power_of(h.beta2, step) : 0;
  }
};

// L2 norms of one tensor: of the unscaled and clipped gradient, of the weights before the step, of
// the update before it is multiplied with the learning rate; and how far the update goes along the
// weights, the sum of update * weight.
struct Norms {
  double grad, weight, update, along;
};

// The update of Adam and its relatives before it is divided: numerator and square.
struct Fraction {
  float numerator, square;
};

// Divides by a root: numerator / (sqrt(square) * factor + eps). A rule that does has a member
// `divide` and its update in two parts: `moments`, which updates the states and returns a Fraction,
// and `take`, which takes the step with the quotient. CUDA divides eight elements at a time
// (cuda/quotient.h).
struct RootDivisor {
  float factor, eps;

  AMP_MP_BOTH float operator()(const Fraction& f) const {
    return f.numerator / (sqrtf(f.square) * factor + eps);
  }
};

// 1, -1, or a zero or a NaN itself; without a branch.
AMP_MP_BOTH float sign_of(float x) {
  const uint32_t u = to_bits(x), magnitude = u & kMagnitude;
  const uint32_t one = (u & ~kMagnitude) | to_bits(1.0f);
  return from_bits(magnitude - 1 < kInfinity ? one : u);
}

// x + decay * w. Without decay the weight counts as 0, or an infinite one would make a NaN. A
// selection of the sum would cost a fourth of a loop's time; the mask of all elements is made once.
AMP_MP_BOTH float add_decay(float x, float decay, float w) {
  const uint32_t mask = decay != 0 ? 0xFFFFFFFFu : 0u;
  return x + decay * from_bits(to_bits(w) & mask);
}

// What decoupled weight decay multiplies a weight with. Chen et al., "Cautious weight decay"
// (2025), algorithm 1: only where update * weight >= 0 with `cautious`.
struct Decay {
  float factor;   // 1 - lr * weight_decay
  float against;  // where the update moves the weight away from 0: 1 if cautious

  static AMP_MP_BOTH Decay at(const Hyper& h) {
    const float factor = float(1 - h.lr * h.weight_decay);
    return {factor, h.cautious ? 1.0f : factor};
  }

  AMP_MP_BOTH float operator()(float update, float w) const {
    return select(update * w >= 0, factor, against);
  }
};

// The decay of a rule that has one, or null.
template <class Rule>
AMP_MP_BOTH Decay* decay_of(Rule& rule) {
  if constexpr (requires { rule.base; }) {
    return decay_of(rule.base);
  } else if constexpr (requires { rule.decay.against; }) {
    return &rule.decay;
  } else {
    return nullptr;
  }
}

template <class Rule>
AMP_MP_BOTH bool is_cautious(Rule rule) {
  const Decay* const decay = decay_of(rule);
  return decay && decay->against != decay->factor;
}

// The same rule, of which the compiler knows that it is not cautious.
template <class Rule>
AMP_MP_BOTH Rule incautious(Rule rule) {
  if (Decay* const decay = decay_of(rule)) decay->against = decay->factor;
  return rule;
}

// Whether state number K of a rule is a mean or sum of squares.
template <class Rule, int K>
constexpr bool is_square = Rule::kKept.of[K].kind == Kind::square;

template <class Rule>
constexpr bool divides_by_root = requires(Rule rule) { rule.divide; };
// Whether a rule is made with the norms of the gradient and the weights.
template <class Rule>
constexpr bool needs_norms = requires { Rule::kNorms; };
// Whether it is made again with those of its update and the weights, once the moments are advanced.
template <class Rule>
constexpr bool needs_update_norm = requires { Rule::kUpdateNorm; };
template <class Rule>
constexpr bool is_layerwise = needs_norms<Rule> || needs_update_norm<Rule>;
// Whether the last of a rule's states is the direction of its update, which others turn into the
// update between its two passes (Muon).
template <class Rule>
constexpr bool has_direction = requires { Rule::kDirection; };
// How many states a step of the rule has, with its direction.
template <class Rule>
constexpr int state_count = Rule::kKept.count + has_direction<Rule>;
template <class Rule>
constexpr bool has_own_number = requires { Rule::kOwn; };

template <class Rule>
AMP_MP_BOTH Rule make_rule(const Hyper& h, Clock& c, [[maybe_unused]] const Norms& n) {
  if constexpr (is_layerwise<Rule>) {
    return Rule::at(h, c, n);
  } else {
    return Rule::at(h, c);
  }
}

}  // namespace amp_mp
