#include "torch/step/step_reports.h"

#include <ATen/ops/zeros.h>

#include <atomic>
#include <cstring>

#include "torch/device.h"

namespace amp_mp {
namespace {

// A consistent copy of the report, or nullopt while the device is writing it.
std::optional<StepReport> read(const StepReport& report) {
  const volatile uint64_t& seal = report.seal;
  StepReport copy;
  const uint64_t before = seal;
  std::atomic_thread_fence(std::memory_order_acquire);
  std::memcpy(&copy, &report, sizeof copy);
  std::atomic_thread_fence(std::memory_order_acquire);
  copy.seal = seal;
  if (before == 0 || before != copy.seal) return std::nullopt;
  return copy;
}

}  // namespace

void check_may_allocate(const at::Device& device) {
  TORCH_CHECK(!is_capturing(device), "amp_mp: the first step on ", device,
              " allocates memory, which a CUDA graph cannot; take a step before capturing");
}

StepReports::StepReports(const at::Device& device) : device_(device) {
  TORCH_CHECK_VALUE(device.is_cuda(), "amp_mp: reports come from a CUDA device, found ", device);
  check_has_cuda(device);
  check_may_allocate(device);
  counts_ = at::zeros({sizeof(StepCounts)}, at::TensorOptions().dtype(at::kByte).device(device));
  const c10::OptionalDeviceGuard guard(device);
  // Never freed: a step that is queued, or replayed later, may still write to it.
  constexpr size_t kBytes = kStepReports * sizeof(StepReport);
  void* memory = nullptr;
  const char* error = cuda::allocate_for_both(kBytes, memory);
  TORCH_CHECK(!error, "amp_mp: CUDA gave no pinned host memory for ", device, ": ", error);
  reports_ = static_cast<StepReport*>(std::memset(memory, 0, kBytes));
}

StepReportBuffer StepReports::buffer() const { return {reports_, data_of<StepCounts>(counts_)}; }

void StepReports::count_decision() {
  void* const stream = current_stream(device_);
  const c10::OptionalDeviceGuard guard(device_);
  if (is_capturing(device_)) {
    is_captured_ = true;
  } else {
    stream_ = stream;
    ++queued_;
  }
}

std::optional<StepReport> StepReports::newest(bool wait) const {
  const auto look = [&] {
    std::optional<StepReport> found;
    for (int i = 0; i < kStepReports; ++i) {
      const std::optional<StepReport> report = read(reports_[i]);
      if (report && (!found || report->seal > found->seal)) found = report;
    }
    return found;
  };
  std::optional<StepReport> found = look();
  if (!wait || (queued_ == 0 && !is_captured_)) return found;
  if (!is_captured_ && found && found->seal >= queued_) return found;
  const c10::OptionalDeviceGuard guard(device_);
  TORCH_CHECK(
      !is_capturing(device_),
      "amp_mp: the report of a captured step exists only after a replay; ask after replaying");
  if (is_captured_) {  // the host sees neither a replay nor its stream, which may be any
    c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
    return look();
  }
  const char* error = cuda::synchronize(stream_);
  TORCH_CHECK(!error, "amp_mp: CUDA failed on ", device_, ": ", error);
  return look();
}

}  // namespace amp_mp
