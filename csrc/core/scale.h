#pragma once
// Loss-scale policies as small state machines over doubles, the same on the host and on a device.
// The state is a float64 tensor: which policy, the scale, then what the policy has. A new policy is
// a struct with `update`, a line in the list and a class in python/amp_mp/scaling.
#include <cmath>
#include <cstdint>

#include "core/log2.h"
#include "core/macros.h"

namespace amp_mp {

AMP_MP_BOTH double clip(double x, double low, double high) {
  return x < low ? low : x > high ? high : x;
}

// A scale that never moves.
struct FixedScale {
  double kind, scale;

  AMP_MP_BOTH void update(bool, double) {}
};

// OpenSeq2Seq's Backoff, which is also Apex's dynamic scaler: divide by step_factor on overflow,
// multiply after every step_window steps since the last one.
struct BackoffScale {
  double kind, scale, scale_min, scale_max, step_factor, step_window, iteration, last_overflow;

  AMP_MP_BOTH void update(bool found_inf, double) {
    if (found_inf) {
      scale = clip(scale / step_factor, scale_min, scale_max);
      last_overflow = iteration;
    } else if (step_window >= 1 && int64_t(iteration - last_overflow) % int64_t(step_window) == 0) {
      scale = clip(scale * step_factor, scale_min, scale_max);
    }
    iteration += 1;
  }
};

// torch.amp's rule with a patience: only the `hysteresis`-th overflow lowers the scale. Apex's
// update_scale_hysteresis is patient again after any clean step, Megatron-LM's DynamicGradScaler
// only after the scale has grown.
struct HysteresisScale {
  double kind, scale, scale_min, scale_max, growth_factor, backoff_factor, growth_interval,
      hysteresis, refill_on_growth, growth_tracker, hysteresis_tracker;

  AMP_MP_BOTH void update(bool found_inf, double) {
    if (found_inf) {
      growth_tracker = 0;
      hysteresis_tracker -= 1;
      if (hysteresis_tracker <= 0) scale = clip(scale * backoff_factor, scale_min, scale_max);
      return;
    }
    growth_tracker += 1;
    const bool grows = growth_tracker == growth_interval;
    if (grows) {
      growth_tracker = 0;
      scale = clip(scale * growth_factor, scale_min, scale_max);
    }
    if (grows || refill_on_growth == 0) hysteresis_tracker = hysteresis;
  }
};

// OpenSeq2Seq's LogMax: log2 of the largest gradient is taken to be normally distributed, and the
// scale such that it stays below log_max with the probability that overflow_std_dev stands for. An
// overflow counts as log_max (the source's 2^log_max would pin the scale for 12,574 steps), and a
// step whose gradients are all zero not at all (its -inf would stay for ever).
struct LogMaxScale {
  double kind, scale, scale_min, scale_max, log_max, beta1, beta2, overflow_std_dev;
  // Exponential averages of x and, more slowly, x and x^2, and the weight that each still lacks.
  double mean, slow_mean, slow_square, missing, slow_missing;

  AMP_MP_BOTH void update(bool found_inf, double max_abs) {
    if (!found_inf && !(max_abs > 0)) return;
    const double x = found_inf ? log_max : log2_of(max_abs);
    mean = beta1 * mean + (1 - beta1) * x;
    slow_mean = beta2 * slow_mean + (1 - beta2) * x;
    slow_square = beta2 * slow_square + (1 - beta2) * (x * x);
    missing *= beta1;
    slow_missing *= beta2;
    const double mu = mean / (1 - missing), slow_mu = slow_mean / (1 - slow_missing);
    const double variance = slow_square / (1 - slow_missing) - slow_mu * slow_mu;
    const double sigma = variance > 0 ? sqrt(variance) : 0;
    scale = clip(exp2_of(log_max - (mu + overflow_std_dev * sigma)), scale_min, scale_max);
  }
};

// NVCaffe's global_grad_scale_adaptive: the largest scaled gradient is to be four times `target`.
struct AdaptiveScale {
  double kind, scale, scale_min, scale_max, target;

  AMP_MP_BOTH void update(bool, double max_abs) {
    scale = clip(max_abs > 0 ? target * 4 / max_abs : target, scale_min, scale_max);
  }
};

// Struct, enumerator, in the order of the numbers that Python's `_kind` has.
#define AMP_MP_FOR_EACH_SCALE(X) \
  X(FixedScale, fixed)           \
  X(BackoffScale, backoff)       \
  X(HysteresisScale, hysteresis) \
  X(LogMaxScale, log_max)        \
  X(AdaptiveScale, adaptive)

#define AMP_MP_ENUMERATOR(Struct, name) name,
enum class ScaleKind : int { AMP_MP_FOR_EACH_SCALE(AMP_MP_ENUMERATOR) };
#undef AMP_MP_ENUMERATOR

// How many numbers the policy's state has; 0 for an unknown one.
inline int scale_state_size(double kind) {
#define AMP_MP_SIZE(Struct, name) \
  case ScaleKind::name: return sizeof(Struct) / sizeof(double);
  switch (ScaleKind(int(kind))) { AMP_MP_FOR_EACH_SCALE(AMP_MP_SIZE) }
#undef AMP_MP_SIZE
  return 0;
}

// After a step: found_inf, whether a gradient was inf or NaN; max_abs, the largest finite unscaled
// |g|.
AMP_MP_BOTH void update_scale_state(double* state, bool found_inf, double max_abs) {
#define AMP_MP_UPDATE(Struct, name) \
  case ScaleKind::name: return reinterpret_cast<Struct*>(state)->update(found_inf, max_abs);
  switch (ScaleKind(int(state[0]))) { AMP_MP_FOR_EACH_SCALE(AMP_MP_UPDATE) }
#undef AMP_MP_UPDATE
}

// torch.amp's own rule on its own two numbers, with its arithmetic: factors multiply in double, the
// result is rounded to float, and one that would be infinite is not taken.
struct TorchScale {
  float scale;
  int32_t growth_tracker;

  AMP_MP_BOTH TorchScale after(bool found_inf, double growth_factor, double backoff_factor,
                               int64_t growth_interval) const {
    if (found_inf) return {float(double(scale) * backoff_factor), 0};
    if (growth_tracker + 1 != growth_interval) return {scale, growth_tracker + 1};
    const float grown = float(double(scale) * growth_factor);
    return {grown <= 3.4028235e38f ? grown : scale, 0};
  }
};

}  // namespace amp_mp
