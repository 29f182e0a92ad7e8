// The scalars of a step, where the tensors are: the host never waits for them.
#include "core/decide.h"
#include "cuda/passes.h"
#include "cuda/ring.h"
#include "cuda/table.h"

namespace amp_mp::cuda {
namespace {

__global__ void decide_kernel(const Statistics* total, Decision decision, Verdict* verdict) {
  if (threadIdx.x != 0) return;
  const double next_scale = settle(total, decision, verdict);
  publish(decision.ring, *verdict, next_scale);
}

__global__ void move_scale_kernel(NextScale next, const double* found_inf, const double* max_abs,
                                  Ring ring) {
  if (threadIdx.x != 0) return;
  const bool found = *found_inf != 0;
  const double largest = max_abs ? *max_abs : 0, scale = move_on(next, found, largest);
  publish(ring, {double(found), 1, 0, largest, scale}, scale);
}

}  // namespace

const char* decide(const Statistics* total, const Decision& decision, Verdict* verdict,
                   void* stream) {
  return message(
      launch(decide_kernel, 1, 32, static_cast<cudaStream_t>(stream), total, decision, verdict));
}

const char* move_scale(const NextScale& next, const double* found_inf, const double* max_abs,
                       const Ring& ring, void* stream) {
  return message(launch(move_scale_kernel, 1, 32, static_cast<cudaStream_t>(stream), next,
                        found_inf, max_abs, ring));
}

}  // namespace amp_mp::cuda
