#pragma once
// The device's side of the reports that the host reads without asking CUDA.
#include "cuda/gpu.h"
#include "plan.h"

namespace amp_mp::cuda {

// By one thread. The seal is taken off first and put on last, each beyond a fence: whoever finds
// the same seal before and after reading has read one report. An event would not do, since none can
// be asked for inside a graph.
__device__ __forceinline__ void publish(const Ring& ring, const Verdict& verdict,
                                        double next_scale) {
  if (!ring.reports) return;
  const uint64_t number = *ring.count + 1;
  Report& report = ring.reports[number % kReports];
  *static_cast<volatile uint64_t*>(&report.seal) = 0;
  __threadfence_system();
  report.verdict = verdict;
  report.next_scale = next_scale;
  __threadfence_system();
  *static_cast<volatile uint64_t*>(&report.seal) = number;
  *ring.count = number;
}

// The verdict of a step, and where the scale goes; returns that for the report. By one thread.
__device__ __forceinline__ double settle(const Statistics* total, const Decision& decision,
                                         Verdict* verdict) {
  const Verdict v = amp_mp::decide(total, decision.scale, decision.found_inf, decision.max_norm);
  *verdict = v;
  return move_on(decision.next, v.found_inf != 0, v.max_abs);
}

}  // namespace amp_mp::cuda
