#pragma once
// Moving averages of weights.
#include "core/macros.h"

namespace amp_mp {

// One element of an average and its next value: average + (1 - decay) * (x - average). As torch's
// lerp does, it goes from whichever end is nearer, so that a decay of 0 and one of 1 are exact.
struct Averaging {
  float keep, take;  // decay and 1 - decay, each rounded once

  static Averaging at(double decay) { return {float(decay), float(1 - decay)}; }

  AMP_MP_BOTH float operator()(float average, float x) const {
    const float difference = x - average;
    const float near_average = average + take * difference, near_x = x - keep * difference;
    const float between = take < 0.5f ? near_average : near_x;
    return keep == 0 ? x : between;  // also where the difference is infinite or NaN
  }
};

}  // namespace amp_mp
