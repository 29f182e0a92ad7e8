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
  const uint64_t seal = buffer.counts->decided + 1;
  const uint64_t skipped = verdict.found_inf != 0 ? buffer.counts->skipped_in_a_row + 1 : 0;
  StepReport& report = buffer.reports[seal % kStepReports];
  *static_cast<volatile uint64_t*>(&report.seal) = 0;
  __threadfence_system();
  report.verdict = verdict;
  report.next_scale = next_scale;
  report.skipped_in_a_row = skipped;
  __threadfence_system();
  *static_cast<volatile uint64_t*>(&report.seal) = seal;
  buffer.counts->decided = seal;
  buffer.counts->skipped_in_a_row = skipped;
}

}  // namespace amp_mp::cuda
