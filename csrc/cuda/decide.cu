// The scalars of a step, where the tensors are: the host never waits for them.
#include "core/decide.h"
#include "cuda/passes.h"
#include "cuda/table.h"

namespace amp_mp::cuda {
namespace {

__global__ void decide_kernel(const Statistics* total, const float* scale, const float* found_inf,
                              double max_norm, Verdict* verdict) {
  if (threadIdx.x == 0) *verdict = amp_mp::decide(total, scale, found_inf, max_norm);
}

__global__ void update_scale_kernel(double* state, const float* found_inf, const double* max_abs) {
  if (threadIdx.x == 0) amp_mp::update_scale(state, *found_inf != 0, max_abs ? *max_abs : 0);
}

}  // namespace

const char* decide(const Statistics* total, const float* scale, const float* found_inf,
                   double max_norm, Verdict* verdict, void* stream) {
  return message(launch(decide_kernel, 1, 32, static_cast<cudaStream_t>(stream), total, scale,
                        found_inf, max_norm, verdict));
}

const char* update_scale(double* state, const float* found_inf, const double* max_abs,
                         void* stream) {
  return message(launch(update_scale_kernel, 1, 32, static_cast<cudaStream_t>(stream), state,
                        found_inf, max_abs));
}

}  // namespace amp_mp::cuda
