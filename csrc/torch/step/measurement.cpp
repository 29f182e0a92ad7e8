#include "torch/step/measurement.h"

#include "cpu/passes.h"
#include "torch/python/scalars.h"

#include <ATen/Parallel.h>

namespace amp_mp {

Measurement::Measurement(const std::vector<Reading>& readings, const at::Device& device)
    : rows_(at::empty({int64_t(readings.size()) + 1, 3},
                      at::TensorOptions().dtype(at::kDouble).device(device))),
      count_(int64_t(readings.size())),
      stream_(stream_of(rows_)) {
  const int64_t spans = cpu::count_spans(readings.data(), count_);
  // On CUDA: the ticket, the index of each tensor's first span, the spans.
  const int64_t head = device.is_cpu() ? 0 : 8 + 8 * (count_ + 1);
  sums_ = scratch(head + spans * int64_t(sizeof(Statistics)), device);
  on(
      device,
      [&] {
        cpu::measure(readings.data(), count_, data_of<Statistics>(sums_), of_tensors(),
                     at::get_num_threads());
        sums_.reset();
      },
      AMP_MP_CUDA(measure(readings.data(), span_sums(), stream)));
}

Measurement::Measurement(at::Tensor rows) : rows_(std::move(rows)), count_(0), stream_(nullptr) {
  check_doubles<Statistics>(rows_, "rows", 3);
  TORCH_CHECK_VALUE(rows_.dim() == 2 && rows_.size(1) == 3, "amp_mp: rows (", describe(rows_),
                    ") must have shape [n + 1, 3]");
  count_ = rows_.size(0) - 1;
  stream_ = stream_of(rows_);
}

void Measurement::use() const {
  if (stream_of(rows_) == stream_) return;
  used_on_current_stream(rows_);
  used_on_current_stream(sums_);
}

cuda::SpanSums Measurement::span_sums() const {
  cuda::SpanSums s;
  s.tensors = of_tensors();
  s.count = count_;
  if (!sums_.defined()) return s;
  char* memory = data_of<char>(sums_);
  s.ticket = reinterpret_cast<unsigned*>(memory);
  s.first_span = reinterpret_cast<int64_t*>(memory + 8);
  s.spans = reinterpret_cast<Statistics*>(memory + 8 + 8 * (count_ + 1));
  return s;
}

const at::Tensor& Measurement::rows() {
  use();
  if (!sums_.defined()) return rows_;
  on(device(), [] {}, AMP_MP_CUDA(combine(span_sums(), stream)));
  sums_.reset();
  return rows_;
}

}  // namespace amp_mp
