#pragma once
// How the device tells the host what it has decided.
#include "cuda/gpu.h"
#include "plan.h"

namespace amp_mp::cuda {

// Writes a report into host memory. The seal is cleared first and set last, each separated by a
// fence: a host that reads the same seal before and after has read one complete report. A CUDA
// event would not do, since it cannot be queried inside a graph.
__device__ __forceinline__ void write_report(const StepReportBuffer& buffer, const Verdict& verdict,
                                             double next_scale) {
  if (!buffer.reports) return;
  StepCounts& counts = *buffer.counts;
  const uint64_t skipped = verdict.skip != 0 ? counts.skipped_in_a_row + 1 : 0;
  const uint64_t overflows = counts.overflows + (verdict.skip == kOverflow);
  const uint64_t spikes = counts.spikes + (verdict.skip == kSpike);
  const uint64_t seal = counts.decided + 1;
  StepReport& report = buffer.reports[seal % kStepReports];
  *static_cast<volatile uint64_t*>(&report.seal) = 0;
  __threadfence_system();
  report.verdict = verdict;
  report.next_scale = next_scale;
  report.skipped_in_a_row = skipped;
  report.overflows = overflows;
  report.spikes = spikes;
  __threadfence_system();
  *static_cast<volatile uint64_t*>(&report.seal) = seal;
  counts.decided = seal;
  counts.skipped_in_a_row = skipped;
  counts.overflows = overflows;
  counts.spikes = spikes;
}

}  // namespace amp_mp::cuda
