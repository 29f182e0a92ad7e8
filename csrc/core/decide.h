#pragma once
// From the measured gradients to the step's verdict: whether to skip it, and the number that
// gradients are multiplied with.
#include <cmath>

#include "core/macros.h"
#include "core/norm_limit.h"
#include "core/reduce.h"

namespace amp_mp {

// Why a step is skipped, which then changes no byte.
constexpr double kOverflow = 1;  // an inf or NaN, or a loss scale without a reciprocal
constexpr double kSpike = 2;     // a finite norm above the limit

// All doubles: they are the elements of the verdict tensor, float64 [5].
struct Verdict {
  double skip;        // kOverflow or kSpike; or 0
  double multiplier;  // 1 / scale * clip coefficient
  double norm;        // of the unscaled, unclipped gradients; inf if one is not finite
  double max_abs;     // largest finite unscaled |g|
  double scale;       // the loss scale that the gradients were multiplied with
};

// Any pointer may be null. `found_inf` is the verdict of torch's GradScaler, a float: the number of
// devices that have found an overflow. max_norm <= 0 means no clipping; the coefficient is
// torch.nn.utils.clip_grad_norm_'s, min(1, max_norm / (norm + 1e-6)).
AMP_MP_BOTH Verdict decide(const Statistics* total, const float* scale, const float* found_inf,
                           double max_norm, const NormLimit& limit = {}) {
  Verdict v = {0, 1, 0, 0, scale ? double(*scale) : 1.0};
  const double unscale = 1 / v.scale;
  if (found_inf && *found_inf != 0) v.skip = kOverflow;
  if (total) {
    if (total->non_finite > 0) v.skip = kOverflow;
    v.norm = total->non_finite > 0 ? HUGE_VAL : sqrt(total->sum_squares) * unscale;
    v.max_abs = total->max_abs * unscale;
  }
  const double coefficient = max_norm > 0 ? max_norm / (v.norm + 1e-6) : 1.0;
  v.multiplier = unscale * (coefficient < 1 ? coefficient : 1.0);
  // A loss scale of 0, NaN or 2^-128 and less, whose reciprocal float32 does not have: every update
  // would be NaN. torch's scaler finds these in its unscaled gradients.
  if (!(fabs(v.multiplier) <= 3.4028234663852886e38)) v.skip = kOverflow;
  if (total && v.skip == 0 && limit.stops(v.norm)) v.skip = kSpike;
  return v;
}

}  // namespace amp_mp
