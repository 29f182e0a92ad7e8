#pragma once
// Plain data that crosses between torch and the kernels. No torch, no CUDA.
#include <cstdint>

#include "core/decide.h"
#include "core/formats.h"
#include "core/reduce.h"
#include "core/rules.h"
#include "core/scale.h"

namespace amp_mp {

// A run of elements in memory: dense, any alignment its type allows, possibly empty.
struct Span {
  void* data;
  Format format;
};

// One parameter in an apply pass. All arrays have `size` elements in the same order.
struct Slot {
  int64_t size;
  Span grad;               // still scaled
  Span weight;             // low-precision copy to write, data null where the master is the weight
  Span master;             // what the rule updates
  Span state[kMaxStates];  // as many as the rule has
  Clock* clock;
  int32_t group;  // which Hyper
};

// One pair in a copy pass: to = from * multiplier.
struct Transfer {
  int64_t size;
  Span to, from;
  bool saturate;  // clamp to +-65504 where `to` is float16
};

// One tensor in a measure pass.
struct Reading {
  int64_t size;
  Span data;
};

constexpr int64_t ceil_divide(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace amp_mp
