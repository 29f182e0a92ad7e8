#pragma once
// The last decisions of a CUDA device, in host memory: reading one calls CUDA only if the host has
// to wait for it.
#include <ATen/core/Tensor.h>

#include <optional>

#include "plan.h"

namespace amp_mp {

// Raises while a CUDA graph is being captured, since its memory is not kept.
void check_may_allocate(const at::Device& device);

class StepReports {
 public:
  // `device` is a CUDA device. Raises while a CUDA graph is being captured, since it allocates.
  explicit StepReports(const at::Device& device);
  StepReports(const StepReports&) = delete;
  StepReports& operator=(const StepReports&) = delete;

  at::Device device() const { return device_; }

  // The buffer for the next decision on the device's current stream.
  StepReportBuffer buffer() const;
  // Call once for each decision, when it has been queued on the current stream.
  void count_decision();

  // The newest decision that has reached the host, or nullopt; `seal` counts decisions from 1. With
  // `wait` the newest in the queue: waits for its stream or, once a graph holds a decision, for the
  // whole device, since replays may be on any stream.
  std::optional<StepReport> newest(bool wait) const;

 private:
  at::Device device_;
  at::Tensor counts_;
  StepReport* reports_;
  uint64_t queued_ = 0;       // decisions, not counting replays of CUDA graphs
  bool is_captured_ = false;  // replays of a graph may have decided more often than the host knows
  void* stream_ = nullptr;    // of the last decision that no graph holds
};

}  // namespace amp_mp
