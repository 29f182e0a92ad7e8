#pragma once
// The Statistics of tensors, from one read. On CUDA they are first the statistics of spans; the
// step's first kernel adds the spans, or rows() does if it is called before the step.
#include "torch/checks.h"
#include "torch/device.h"

namespace amp_mp {

class Measurement {
 public:
  // Measures on the CPU, or queues the measuring on a CUDA device.
  Measurement(const std::vector<Reading>& readings, const at::Device& device);
  // Statistics that are known already, in the form of rows().
  explicit Measurement(at::Tensor rows);

  // float64 [n + 1, 3]: core/reduce.h's Statistics of each tensor and, in the last row, of all.
  const at::Tensor& rows();
  at::Device device() const { return rows_.device(); }
  int64_t count() const { return count_; }
  const at::Tensor& rows_so_far() const { return rows_; }
  // The rows' memory; on CUDA it may not have been filled yet.
  Statistics* of_tensors() const { return data_of<Statistics>(rows_); }
  // Call where the current stream reads or writes the memory: it may have been measured on another.
  void use() const;

  cuda::SpanSums span_sums() const;
  // Call when a kernel has been queued that adds the spans.
  void mark_added() { sums_.reset(); }

 private:
  at::Tensor rows_, sums_;  // sums: memory of SpanSums, undefined once the spans are added
  int64_t count_;
  void* stream_ = nullptr;  // on which the memory was allocated
};

}  // namespace amp_mp
