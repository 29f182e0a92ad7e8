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
// statistics and numbers.
struct Measured {
  const Statistics *grads = nullptr, *weights = nullptr;
  Statistics *update_spans = nullptr, *updates = nullptr;
  int64_t* first_span = nullptr;
};

constexpr int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace amp_mp
