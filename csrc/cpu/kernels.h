#pragma once
// The inner loops of the CPU passes: for each instruction set one table of functions, and one for
// each rule.
#include "plan.h"

namespace amp_mp {
struct Float8;  // core/float8.h
}

namespace amp_mp::cpu {

// Loops of one rule over elements [begin, end) of a slot. `rule` is one that RuleInfo::make has
// made.
struct Loops {
  void (*apply)(const Slot& slot, int64_t begin, int64_t end, const void* rule, float multiplier,
                uint64_t seed);
  // First passes of rules that have two: cpu/first_passes.h; of update_sums at most one kSpan.
  void (*directions)(const Slot& slot, int64_t begin, int64_t end, const void* rule,
                     float multiplier, uint64_t seed);
  UpdateSums (*update_sums)(const Slot& slot, int64_t begin, int64_t end, const void* rule,
                            float multiplier, uint64_t seed);
};

// Loops that know no rule.
struct Kernels {
  const char* name;
  Statistics (*measure)(const Reading& reading, int64_t begin, int64_t end);  // at most one kSpan
  void (*copy)(const Transfer& transfer, int64_t begin, int64_t end, float multiplier);
  void (*average)(const Transfer& transfer, int64_t begin, int64_t end, Averaging averaging);
  void (*compare)(const Comparison& comparison, int64_t begin, int64_t end);  // from whole tiles on
  // Of one chunk, which is from whole tiles on; gather is told what the bits are.
  int64_t (*count_bits)(const Changes& changes, int64_t begin, int64_t end);
  void (*look)(const Watched& watched, int64_t begin, int64_t end);
  void (*gather)(const Gathering& gathering, int64_t begin, int64_t end, int64_t first,
                 int64_t count);
  void (*multiply)(const Product& product, int64_t begin, int64_t end);  // columns of the result
  void (*widen_transposed)(const Transposed& transposed);                // wide from low
  void (*round_transposed)(const Transposed& transposed);                // low from wide
  void (*norm)(const Norm& norm, int64_t begin, int64_t end);            // rows
  // The gradients of weight and bias are added to the sums, of `width` elements each or null.
  void (*norm_gradients)(const Norm& norm, int64_t begin, int64_t end, float* weight_sums,
                         float* bias_sums);
  // n gradients: (grad * inverse + decay * weight) * ratio, the sum rounded once.
  void (*adapt)(float* grad, const float* weight, int64_t n, float inverse, float decay,
                float ratio);
  void (*float8)(const Float8& float8, int64_t begin, int64_t end);  // blocks
};

// kWorkspace floats of the calling thread, at a multiple of 64 bytes, until it ends.
constexpr int kWorkspace = 208 * 1024;
float* workspace();

// The table for this processor, chosen once: the best it can run, or what the environment variable
// AMP_MP_CPU=baseline|avx2|avx512 names; null if that is unknown or cannot run here.
const Kernels* kernels();
// A rule's loops for the same instruction set.
const Loops& loops_of(const RuleInfo& rule);

}  // namespace amp_mp::cpu
