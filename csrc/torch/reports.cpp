#include "torch/reports.h"

#include <ATen/ops/zeros.h>

#include <atomic>
#include <cstring>

#include "torch/device.h"

namespace amp_mp {
namespace {

// The report as one consistent copy, or nullopt while the device is writing it.
std::optional<Report> read(const Report& slot) {
  const volatile uint64_t& seal = slot.seal;
  Report copy;
  const uint64_t before = seal;
  std::atomic_thread_fence(std::memory_order_acquire);
  std::memcpy(&copy, &slot, sizeof copy);
  std::atomic_thread_fence(std::memory_order_acquire);
  copy.seal = seal;
  if (before == 0 || before != copy.seal) return std::nullopt;
  return copy;
}

}  // namespace

#ifdef AMP_MP_WITH_CUDA

Reports::Reports(const at::Device& device) : device_(device) {
  TORCH_CHECK_VALUE(device.is_cuda(), "amp_mp: reports come from a CUDA device, found ", device);
  TORCH_CHECK(!is_capturing(device), "amp_mp: the first step on ", device,
              " allocates memory, which a CUDA graph cannot; take a step before capturing");
  count_ = at::zeros({1}, at::TensorOptions().dtype(at::kLong).device(device));
  const c10::OptionalDeviceGuard guard(device);
  // Never freed: a step that is queued, or replayed later, may still write it.
  constexpr size_t kBytes = kReports * sizeof(Report);
  ring_ = static_cast<Report*>(cuda::allocate_for_both(kBytes));
  TORCH_CHECK(ring_, "amp_mp: CUDA gave no ", kBytes, " bytes of pinned host memory for ", device);
  std::memset(ring_, 0, kBytes);
}

Ring Reports::ring_of_next() {
  stream_ = current_stream(device_);
  const c10::OptionalDeviceGuard guard(device_);
  if (cuda::is_capturing(stream_)) {
    is_captured_ = true;
  } else {
    ++queued_;
  }
  return {ring_, reinterpret_cast<uint64_t*>(data_of<int64_t>(count_))};
}

std::optional<Report> Reports::newest(bool wait) const {
  const auto look = [&] {
    std::optional<Report> found;
    for (int i = 0; i < kReports; ++i) {
      const std::optional<Report> report = read(ring_[i]);
      if (report && (!found || report->seal > found->seal)) found = report;
    }
    return found;
  };
  std::optional<Report> found = look();
  if (!wait || (queued_ == 0 && !is_captured_)) return found;
  if (!is_captured_ && found && found->seal >= queued_) return found;
  const c10::OptionalDeviceGuard guard(device_);
  TORCH_CHECK(
      !is_capturing(device_),
      "amp_mp: what a step has come to is not known while it is captured; ask after a replay");
  const char* error = cuda::synchronize(stream_);
  TORCH_CHECK(!error, "amp_mp: CUDA failed on ", device_, ": ", error);
  return look();
}

#else

Reports::Reports(const at::Device& device) : device_(device), ring_(nullptr) {
  TORCH_CHECK(false, "amp_mp was built without CUDA; rebuild with AMP_MP_CUDA=1");
}
Ring Reports::ring_of_next() { return {}; }
std::optional<Report> Reports::newest(bool) const { return read(*ring_); }

#endif

}  // namespace amp_mp
