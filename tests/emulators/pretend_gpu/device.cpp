// Teaches a build of torch that has no CUDA two CUDA devices: which one is current, their streams,
// and what torch asks its CUDA library about.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <new>

#include "ledger.h"
#include "memory.h"

namespace pretend_gpu {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

DeviceIndex current() {
  int device = 0;
  cudaGetDevice(&device);
  return DeviceIndex(device);
}

void make_current(DeviceIndex device) {
  TORCH_CHECK(cudaSetDevice(device) == cudaSuccess, "pretend GPU: there is no device ", device);
}

// Kernels run before their launch returns, so all streams are one, and all events have happened.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device getDevice() const override { return {c10::kCUDA, current()}; }
  void setDevice(Device device) const override { make_current(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { cudaSetDevice(device.index()); }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    if (device.has_index()) make_current(device.index());
    return before;
  }
  DeviceIndex deviceCount() const noexcept override {
    int count = 0;
    cudaGetDeviceCount(&count);
    return DeviceIndex(count);
  }

  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getStream(Device device) const override { return getDefaultStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return getStream(stream.device()); }
  void* getStreamNativeHandle(const Stream) const override { return nullptr; }
  bool queryStream(const Stream&) const override { return true; }
  bool isStreamCapturing(const Stream&) const override { return cuda_on_cpu::under_way(); }
  void synchronizeStream(const Stream&) const override { note_sync("stream.synchronize"); }
  void synchronizeDevice(const DeviceIndex) const override { note_sync("synchronize"); }

  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    static int happened;
    *event = &happened;
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { note_sync("event.synchronize"); }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0; }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return deviceCount(); }
  DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  DeviceIndex current_device() const override { return current(); }
  DeviceIndex getCurrentDevice() const override { return current(); }
  void setCurrentDevice(DeviceIndex device) const override { make_current(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice({c10::kCUDA, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current() : exchangeDevice(device);
  }
  c10::Allocator* getCUDADeviceAllocator() const override { return allocator(); }
  void deviceSynchronize(DeviceIndex) const override { note_sync("synchronize"); }
  // Random numbers are the CPU's, from its default generator too: the same seed, the same numbers.
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
};

// torch asks for its hooks while it is imported, before anybody could register any: ours take the
// place of the object that it holds since. Neither has any data.
[[maybe_unused]] const bool hooked = [] {
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  auto& held = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  new (&held) Hooks;
  return true;
}();

}  // namespace
}  // namespace pretend_gpu
