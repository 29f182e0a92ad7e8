#pragma once
// Loss-scale policies as small state machines over doubles, the same on the host and on a device.
// The state is a float64 tensor whose first element says which policy it is.
#include <cstdint>

#include "core/macros.h"

namespace amp_mp {

enum class Policy : int { fixed = 0, backoff = 1 };

// A scale that never moves.
struct FixedScale {
  double policy, scale;
};

// OpenSeq2Seq's Backoff, which is also Apex's dynamic scaler: divide by step_factor on overflow,
// multiply after every step_window steps since the last one.
struct BackoffScale {
  double policy, scale, scale_min, scale_max, step_factor, step_window, iteration, last_overflow;

  AMP_MP_BOTH double clip(double x) const {
    return x < scale_min ? scale_min : x > scale_max ? scale_max : x;
  }

  AMP_MP_BOTH void update(bool found_inf) {
    if (found_inf) {
      scale = clip(scale / step_factor);
      last_overflow = iteration;
    } else if (step_window >= 1 && int64_t(iteration - last_overflow) % int64_t(step_window) == 0) {
      scale = clip(scale * step_factor);
    }
    iteration += 1;
  }
};

constexpr int kFixedSize = sizeof(FixedScale) / sizeof(double);
constexpr int kBackoffSize = sizeof(BackoffScale) / sizeof(double);

AMP_MP_BOTH void update_scale(double* state, bool found_inf) {
  if (Policy(int(state[0])) == Policy::backoff)
    reinterpret_cast<BackoffScale*>(state)->update(found_inf);
}

}  // namespace amp_mp
