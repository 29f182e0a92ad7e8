#pragma once
// Plain data that crosses between torch and the kernels. No torch, no CUDA.
#include <cstdint>

#include "core/decide.h"
#include "core/formats.h"
#include "core/m8.h"
#include "core/random.h"
#include "core/reduce.h"
#include "core/rules.h"
#include "core/scale.h"
#include "core/splits.h"

namespace amp_mp {

// A run of elements in memory: dense, any alignment its type allows, possibly empty.
struct Span {
  void* data;
  Format format;
  void* rest = nullptr;  // the second array of a format of two: remainders, or scales of groups
};

// One parameter in an apply pass. All arrays have `size` elements in the same order.
struct Slot {
  int64_t size;
  Span grad;               // still scaled
  Span weight;             // low-precision copy to write, data null where the master is the weight
  Span master;             // what the rule updates
  Span state[kMaxStates];  // as many as the rule has
  Clock* clock;
  int32_t group;    // which Hyper
  uint32_t number;  // of the tensor, for its random bits
  int64_t first;    // where element 0 lies in the tensor of which this is a shard
  int64_t row;      // of the lists of statistics
};

// One pair in a copy pass: to = from * multiplier.
struct Transfer {
  int64_t size;
  Span to, from;
  bool saturate;  // clamp to +-65504 where `to` is float16
  Stream stream;  // for a stochastic `to`
};

// One tensor in a measure pass.
struct Reading {
  int64_t size;
  Span data;
};

// For rules that need norms: the statistics of the gradients and of the masters, a row each
// (Slot::row). For those that need their update's, scratch: the spans of all slots, and count + 1
// statistics and numbers, and on a device a ticket (cuda/passes.h, Parts).
struct Measured {
  const Statistics *grads = nullptr, *weights = nullptr;
  Statistics *update_spans = nullptr, *updates = nullptr;
  int64_t* first_span = nullptr;
  unsigned* ticket = nullptr;
};

// What a device's last decisions were, in host memory that the device writes. The device counts
// them itself, so that it also works when a CUDA graph is replayed and the host knows of nothing.
constexpr int kReports = 8;
struct Report {
  uint64_t seal;  // which decision, counted from 1; 0 while the report is being written
  Verdict verdict;
  double next_scale;  // where the decision moved the loss scale, else 0
};
struct Ring {
  Report* reports = nullptr;  // kReports; null for none
  uint64_t* count = nullptr;  // of decisions
};

// How the loss scale moves on after a step, from one set of numbers to another or in place: a
// policy's state or, where that is null, torch's two numbers.
struct NextScale {
  const double* policy = nullptr;
  double* policy_out = nullptr;
  int32_t policy_size = 0;
  const float* scale = nullptr;
  float* scale_out = nullptr;  // with a policy null or its scale
  const int32_t* tracker = nullptr;
  int32_t* tracker_out = nullptr;
  double growth_factor = 0, backoff_factor = 0;
  int64_t growth_interval = 0;
};

// Returns the new scale; 0 where it does not move. max_abs: largest finite unscaled |g|.
AMP_MP_BOTH double move_on(const NextScale& n, bool found_inf, double max_abs) {
  if (n.policy) {
    for (int i = 0; i < n.policy_size; ++i) n.policy_out[i] = n.policy[i];
    update_scale(n.policy_out, found_inf, max_abs);
    const float scale = float(n.policy_out[1]);  // what losses are multiplied with
    if (n.scale_out) *n.scale_out = scale;
    return scale;
  }
  if (!n.scale) return 0;
  const TorchScale next = TorchScale{*n.scale, *n.tracker}.after(
      found_inf, n.growth_factor, n.backoff_factor, n.growth_interval);
  *n.scale_out = next.scale;
  *n.tracker_out = next.growth_tracker;
  return next.scale;
}

// What goes into a verdict, but for the statistics. Pointers may be null.
struct Decision {
  const float *scale = nullptr, *found_inf = nullptr;
  double max_norm = 0;
  NextScale next;
  Ring ring;
};

// What a slot's numbers come to in this step.
template <class Rule>
struct Ready {
  Rule rule;
  float multiplier;  // of the gradient, its sign for maximize
  uint64_t seed;
  double step;
};

constexpr int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace amp_mp
