#pragma once
// What one read of tensors has found. On a device it is left in parts, which the step's first
// kernel adds on its way; whoever asks for rows before that has them added then.
#include "torch/checks.h"
#include "torch/device.h"

namespace amp_mp {

class Measurement {
 public:
  // Reads them, or queues the reading.
  Measurement(const std::vector<Reading>& readings, const at::Device& device);
  // What has been found elsewhere, as rows() gives it.
  explicit Measurement(at::Tensor rows);

  // float64 [n + 1, 3]: of each tensor and, last, of all, core/reduce.h's Statistics.
  const at::Tensor& rows();
  at::Device device() const { return rows_.device(); }
  int64_t count() const { return count_; }
  const at::Tensor& rows_so_far() const { return rows_; }
  // The rows' memory, in which a device's numbers may be still to come.
  Statistics* of_tensors() const { return data_of<Statistics>(rows_); }

#ifdef AMP_MP_WITH_CUDA
  cuda::Parts parts() const;
#endif
  void parts_are_added() { parts_.reset(); }  // by a kernel that has been queued

 private:
  at::Tensor rows_, parts_;  // parts: undefined once they are added
  int64_t count_;
};

}  // namespace amp_mp
