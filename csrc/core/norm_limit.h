#pragma once
// Gradients whose norm is too large to step with: above a number, or far above the norms so far.
#include <cmath>

#include "core/log2.h"

namespace amp_mp {

// What is known of log2 of the norms of the steps taken: as many as a window has, then an
// exponential average. The elements of a float64 [4] tensor.
struct NormHistory {
  double count;           // of norms, at most the window
  double mean, variance;  // of their log2
  double skipped;         // steps in a row because of it
};

struct NormLimit {
  double fixed = 0;                // 0: none
  double sigmas = 0, window = 0;   // of the history
  NormHistory* history = nullptr;  // null: none

  // The deviation counts as at least this: norms within 4 % of each other say nothing about 5 %.
  static constexpr double kLeastDeviation = 1.0 / 16;

  // Whether the step is to be skipped; a norm that is taken joins the history. Nothing is skipped
  // before half of a window is known, as in OLMo-core's SkipStepOptimizer. After as many steps
  // skipped in a row as the window has, the norms have found another level: all are forgotten.
  AMP_MP_BOTH bool stops(double norm) const {
    if (fixed > 0 && norm > fixed) return true;
    if (!history || !(norm > 0)) return false;
    NormHistory& h = *history;
    const double distance = log2_of(norm) - h.mean, deviation = sqrt(h.variance),
                 least = deviation > kLeastDeviation ? deviation : kLeastDeviation;
    if (2 * h.count >= window && distance > sigmas * least) {
      h.skipped += 1;
      if (h.skipped >= window) h = {};
      return true;
    }
    h.count = h.count < window ? h.count + 1 : window;
    const double share = 1 / h.count;
    h.mean += share * distance;
    h.variance = (1 - share) * (h.variance + share * (distance * distance));
    h.skipped = 0;
    return false;
  }
};

}  // namespace amp_mp
