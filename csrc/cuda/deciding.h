#pragma once
// The decision of a step by one thread block. Every number that it needs is requested before the
// first is used, because each is in memory that nothing has read since the last step.
#include "core/decide.h"
#include "cuda/gpu.h"
#include "plan.h"

namespace amp_mp::cuda {

constexpr int kMostPolicy = 16;  // numbers of a policy's state that are kept in shared memory

// What the threads of the block share, and copies of what the decision reads.
struct DecideShared {
  double policy[kMostPolicy];
  Statistics total;
  Verdict verdict;
  NormHistory history;
  float scale, found_inf, old_scale;
  int32_t tracker;
};

class Decision {
 public:
  // Every thread of the block calls these two. In between only `shared.total` is written.
  __device__ __forceinline__ Decision(const Criteria& inputs, DecideShared& shared)
      : inputs_(inputs), shared_(shared), update_(inputs.scale_update) {
    if (threadIdx.x < kMostPolicy && int(threadIdx.x) < update_.policy_size)
      shared.policy[threadIdx.x] = update_.policy[threadIdx.x];
    if (threadIdx.x != 0) return;
    if (inputs.limit.history) shared.history = *inputs.limit.history;
    if (inputs.scale) shared.scale = *inputs.scale;
    if (inputs.found_inf) shared.found_inf = *inputs.found_inf;
    if (update_.policy || !update_.scale) return;
    shared.old_scale = *update_.scale;
    shared.tracker = *update_.tracker;
  }

  // Fills `verdict` and updates the loss scale. has_total: the first thread has filled `total` of
  // the shared numbers. It gets the new scale for the report.
  __device__ __forceinline__ double make(bool has_total, Verdict* verdict) {
    __syncthreads();  // the policy is in shared memory
    const bool is_short = update_.policy && update_.policy_size <= kMostPolicy;
    double next_scale = 0;
    if (threadIdx.x == 0) {
      NormLimit limit = inputs_.limit;
      if (limit.history) limit.history = &shared_.history;
      const Verdict v = amp_mp::decide(
          has_total ? &shared_.total : nullptr, inputs_.scale ? &shared_.scale : nullptr,
          inputs_.found_inf ? &shared_.found_inf : nullptr, inputs_.max_norm, limit);
      if (limit.history) *inputs_.limit.history = shared_.history;
      *verdict = shared_.verdict = v;
      ScaleUpdate update = update_;
      if (is_short) update.policy = update.policy_out = shared_.policy;
      if (update.scale) update.scale = &shared_.old_scale;
      if (update.tracker) update.tracker = &shared_.tracker;
      next_scale = update_loss_scale(update, v.skip == kOverflow, v.max_abs);
    }
    __syncthreads();  // the verdict is there, and the policy's new state
    if (is_short && int(threadIdx.x) < update_.policy_size)
      update_.policy_out[threadIdx.x] = shared_.policy[threadIdx.x];
    return next_scale;
  }

 private:
  const Criteria& inputs_;
  DecideShared& shared_;
  const ScaleUpdate& update_;
};

}  // namespace amp_mp::cuda
