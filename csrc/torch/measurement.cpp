#include "torch/measurement.h"

#include "cpu/passes.h"

#include <ATen/Parallel.h>

namespace amp_mp {

Measurement::Measurement(const std::vector<Reading>& readings, const at::Device& device)
    : rows_(at::empty({int64_t(readings.size()) + 1, 3},
                      at::TensorOptions().dtype(at::kDouble).device(device))),
      count_(int64_t(readings.size())) {
  const int64_t spans = cpu::count_spans(readings.data(), count_);
  // For a device: the ticket, where each tensor's spans begin, the spans.
  const int64_t head = device.is_cpu() ? 0 : 8 + 8 * (count_ + 1);
  parts_ = scratch(head + spans * int64_t(sizeof(Statistics)), device);
  on(
      device,
      [&] {
        cpu::measure(readings.data(), count_, data_of<Statistics>(parts_), of_tensors(),
                     at::get_num_threads());
        parts_.reset();
      },
      AMP_MP_CUDA(measure(readings.data(), parts(), stream)));
}

Measurement::Measurement(at::Tensor rows) : rows_(std::move(rows)), count_(rows_.size(0) - 1) {}

#ifdef AMP_MP_WITH_CUDA
cuda::Parts Measurement::parts() const {
  cuda::Parts p;
  p.tensors = of_tensors();
  p.count = count_;
  if (!parts_.defined()) return p;
  char* memory = data_of<char>(parts_);
  p.ticket = reinterpret_cast<unsigned*>(memory);
  p.first_span = reinterpret_cast<int64_t*>(memory + 8);
  p.spans = reinterpret_cast<Statistics*>(memory + 8 + 8 * (count_ + 1));
  return p;
}
#endif

const at::Tensor& Measurement::rows() {
  if (!parts_.defined()) return rows_;
  on(device(), [] {}, AMP_MP_CUDA(combine(parts(), stream)));
  parts_.reset();
  return rows_;
}

}  // namespace amp_mp
