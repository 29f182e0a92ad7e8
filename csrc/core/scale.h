#pragma once
// Loss-scale policies as small state machines over doubles, the same on the host and on a device. A
// policy's state is a float64 tensor: its kind, the scale, then its own fields. A new policy is a
// struct with `update`, a line in the list below and a class in python/amp_mp/scaling.
#include <cmath>
#include <cstdint>

#include "core/log2.h"
#include "core/macros.h"

namespace amp_mp {

AMP_MP_BOTH double clip(double x, double low, double high) {
  return x < low ? low : x > high ? high : x;
}

// The state of a policy, all double, and the names of the fields after `kind`, separated by ", ".
#define AMP_MP_SCALE_FIELDS(...) \
  double kind, __VA_ARGS__;      \
  static constexpr const char* kFields = #__VA_ARGS__

// A scale that never changes.
struct FixedScale {
  AMP_MP_SCALE_FIELDS(scale);

  AMP_MP_BOTH void update(bool, double) {}
};

// OpenSeq2Seq's Backoff, which is also Apex's dynamic scaler: divide by step_factor on overflow,
// multiply by it after every step_window steps without one.
struct BackoffScale {
  AMP_MP_SCALE_FIELDS(scale, scale_min, scale_max, step_factor, step_window, iteration,
                      last_overflow);

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

// torch.amp's rule with patience: only overflow number `hysteresis` lowers the scale. The count of
// overflows starts again after any clean step, as in Apex's update_scale_hysteresis; or, with
// refill_on_growth, only after the scale has grown, as in Megatron-LM's DynamicGradScaler.
struct HysteresisScale {
  AMP_MP_SCALE_FIELDS(scale, scale_min, scale_max, growth_factor, backoff_factor, growth_interval,
                      hysteresis, refill_on_growth, growth_tracker, hysteresis_tracker);

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

// OpenSeq2Seq's LogMax: assumes that log2 of the largest gradient is normally distributed, and
// chooses the scale so that the scaled gradient stays below 2^log_max with the probability that
// belongs to overflow_std_dev standard deviations. Two differences to the source: an overflow
// counts as log_max (2^log_max would hold the scale down for 12,574 steps), and a step whose
// gradients are all zero is ignored (its -inf would stay in the averages for ever).
//
// mean and slow_mean are exponential averages of x with beta1 and beta2, slow_square of x^2 with
// beta2; missing = beta1^t and slow_missing = beta2^t correct their bias.
struct LogMaxScale {
  AMP_MP_SCALE_FIELDS(scale, scale_min, scale_max, log_max, beta1, beta2, overflow_std_dev, mean,
                      slow_mean, slow_square, missing, slow_missing);

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

// NVCaffe's global_grad_scale_adaptive: the largest scaled gradient should be four times `target`.
struct AdaptiveScale {
  AMP_MP_SCALE_FIELDS(scale, scale_min, scale_max, target);

  AMP_MP_BOTH void update(bool, double max_abs) {
    scale = clip(max_abs > 0 ? target * 4 / max_abs : target, scale_min, scale_max);
  }
};

// fairseq's DynamicLossScaler: lowers the scale only where the share of steps with an overflow,
// since the scale last changed, has reached `tolerance`. As there, growing does not start the count
// of overflows anew.
struct ToleranceScale {
  AMP_MP_SCALE_FIELDS(scale, scale_min, scale_max, step_factor, step_window, tolerance, iteration,
                      last_overflow, last_rescale, overflows);

  AMP_MP_BOTH void update(bool found_inf, double) {
    if (found_inf) {
      last_overflow = iteration;
      overflows += 1;
      if (overflows / (iteration - last_rescale) >= tolerance) {
        scale = clip(scale / step_factor, scale_min, scale_max);
        last_rescale = iteration;
        overflows = 0;
      }
    } else if (step_window >= 1 && int64_t(iteration - last_overflow) % int64_t(step_window) == 0) {
      scale = clip(scale * step_factor, scale_min, scale_max);
      last_rescale = iteration;
    }
    iteration += 1;
  }
};

// The list of policies: struct, name. A state's `kind` is the index in this list.
#define AMP_MP_FOR_EACH_SCALE(X) \
  X(FixedScale, fixed)           \
  X(BackoffScale, backoff)       \
  X(HysteresisScale, hysteresis) \
  X(LogMaxScale, log_max)        \
  X(AdaptiveScale, adaptive)     \
  X(ToleranceScale, tolerance)

#define AMP_MP_SCALE(Struct, name) name,
enum class ScaleKind : int { AMP_MP_FOR_EACH_SCALE(AMP_MP_SCALE) };
#undef AMP_MP_SCALE

// Number of doubles in the state of a policy; 0 for an unknown kind.
inline int scale_state_size(double kind) {
#define AMP_MP_SCALE(Struct, name) \
  case ScaleKind::name: return sizeof(Struct) / sizeof(double);
  switch (ScaleKind(int(kind))) { AMP_MP_FOR_EACH_SCALE(AMP_MP_SCALE) }
#undef AMP_MP_SCALE
  return 0;
}

// Updates a policy's state after a step. found_inf: whether a gradient was inf or NaN; max_abs: the
// largest finite unscaled |g|.
AMP_MP_BOTH void update_scale_state(double* state, bool found_inf, double max_abs) {
#define AMP_MP_SCALE(Struct, name) \
  case ScaleKind::name: return reinterpret_cast<Struct*>(state)->update(found_inf, max_abs);
  switch (ScaleKind(int(state[0]))) { AMP_MP_FOR_EACH_SCALE(AMP_MP_SCALE) }
#undef AMP_MP_SCALE
}

// torch.amp.GradScaler's rule on its own two numbers, with its arithmetic: factors multiply in
// double, the result is rounded to float, and a result that would be infinite is not used. Unlike
// torch's, nor is one below 2^-126, the smallest normal float: torch's scale reaches 0 after 166
// overflows in a row, and the next gradients, all 0 and divided by 0, make NaN of the weights.
struct TorchScale {
  float scale;
  int32_t growth_tracker;

  AMP_MP_BOTH TorchScale after(bool found_inf, double growth_factor, double backoff_factor,
                               int64_t growth_interval) const {
    if (found_inf) {
      const float lowered = float(double(scale) * backoff_factor);
      return {lowered >= 1.17549435e-38f ? lowered : scale, 0};
    }
    if (growth_tracker + 1 != growth_interval) return {scale, growth_tracker + 1};
    const float grown = float(double(scale) * growth_factor);
    return {grown <= 3.4028235e38f ? grown : scale, 0};
  }
};

}  // namespace amp_mp
