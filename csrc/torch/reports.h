#pragma once
// What the last decisions on a device were, for the host: reading one costs no call to CUDA, unless
// it has to be waited for.
#include <ATen/core/Tensor.h>

#include <optional>

#include "plan.h"

namespace amp_mp {

class Reports {
 public:
  // `device` is a CUDA device. Not while a stream is capturing: memory is allocated.
  explicit Reports(const at::Device& device);
  Reports(const Reports&) = delete;
  Reports& operator=(const Reports&) = delete;

  at::Device device() const { return device_; }

  // For the operation that is about to decide on the device's current stream.
  Ring ring_of_next();

  // The newest decision that has reached the host, number counted from 1; nullopt if there is none.
  // wait: the newest that has been queued, by waiting for its stream unless it is there.
  std::optional<Report> newest(bool wait) const;

 private:
  at::Device device_;
  at::Tensor count_;
  Report* ring_;
  uint64_t queued_ = 0;       // decisions, but for those of a graph's replays
  bool is_captured_ = false;  // a graph may decide without the host's knowing
  void* stream_ = nullptr;    // of the last decision
};

}  // namespace amp_mp
