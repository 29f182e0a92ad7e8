// Teaches a build of torch that has no CUDA two CUDA devices: which one is current, their streams,
// and what torch asks its CUDA library about.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <new>

#include "current_stream.h"
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

// An event is a mark in a stream (cuda_on_cpu/streams.h).
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
  Stream getStream(Device device) const override {
    if (!device.has_index()) device.set_index(current());
    return Stream(Stream::UNSAFE, device, c10::StreamId(current_stream(device.index()).handle));
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream getNewStream(Device device, int) const override {
    static std::atomic<c10::StreamId> last = 0;
    if (!device.has_index()) device.set_index(current());
    return Stream(Stream::UNSAFE, device, ++last);
  }
  Stream exchangeStream(Stream stream) const override {
    return Stream(Stream::UNSAFE, stream.device(),
                  exchange_stream(stream.device_index(), stream.id()));
  }
  void* getStreamNativeHandle(const Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    if (data.get()) also_used_on(data.get(), id_of(stream));
  }
  bool queryStream(const Stream& stream) const override {
    return cuda_on_cpu::is_reached(cuda_on_cpu::mark(id_of(stream)));
  }
  bool isStreamCapturing(const Stream&) const override { return cuda_on_cpu::under_way(); }
  void synchronizeStream(const Stream& stream) const override {
    note_sync("stream.synchronize");
    cuda_on_cpu::finish(id_of(stream));
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    note_sync("synchronize");
    cuda_on_cpu::finish_device(device);
  }

  void record(void** event, const Stream& stream, const DeviceIndex,
              const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(cuda_on_cpu::mark(id_of(stream)));
  }
  void block(void* event, const Stream& stream) const override {
    cuda_on_cpu::wait_for(id_of(stream), mark_of(event));
  }
  bool queryEvent(void* event) const override { return cuda_on_cpu::is_reached(mark_of(event)); }
  void synchronizeEvent(void* event) const override {
    note_sync("event.synchronize");
    cuda_on_cpu::finish(mark_of(event));
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0; }

 private:
  static cuda_on_cpu::Mark mark_of(void* event) {
    return reinterpret_cast<cuda_on_cpu::Mark>(event);
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  long versionRuntimeCuDNN() const override { return 0; }  // asked before attention is chosen
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
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  void deviceSynchronize(DeviceIndex device) const override { Guard().synchronizeDevice(device); }
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
