#include "runtime.h"

#include <cstdlib>
#include <stdexcept>
#include <utility>

namespace {

constexpr int kDevices = 2, kMultiprocessors = 4;
thread_local int current_device = 0;
std::atomic<cuda_on_cpu::Recording*> open_recording = nullptr;

bool too_old() { return cuda_on_cpu::driver_version < CUDART_VERSION; }
bool capturing() { return open_recording.load() != nullptr; }

cuda_on_cpu::StreamId of_current_device(cudaStream_t stream) {
  return {current_device, reinterpret_cast<intptr_t>(stream)};
}

template <class Finish>
cudaError_t synchronise(const Finish& finish) {
  if (capturing()) return cudaErrorStreamCaptureUnsupported;
  ++cuda_on_cpu::counts.synchronisations;
  finish();
  return cudaSuccess;
}

}  // namespace

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInsufficientDriver:
      return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorStreamCaptureImplicit:
      return "operation would make the legacy stream depend on a capturing blocking stream";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
  }
  return "unrecognized error code";
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= kDevices) return cudaErrorInvalidDevice;
  if (attribute != cudaDevAttrMultiProcessorCount) return cudaErrorInvalidValue;
  *value = kMultiprocessors;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return synchronise([&] { cuda_on_cpu::finish(of_current_device(stream)); });
}

cudaError_t cudaDeviceSynchronize() {
  return synchronise([] { cuda_on_cpu::finish_device(current_device); });
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = cuda_on_cpu::driver_version;
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags) {
  if (too_old()) return cudaErrorInsufficientDriver;
  if (flags & ~(cudaHostAllocPortable | cudaHostAllocMapped)) return cudaErrorInvalidValue;
  if (capturing()) return cudaErrorStreamCaptureUnsupported;
  *memory = malloc(bytes);
  return *memory || bytes == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFreeHost(void* memory) {
  if (capturing()) return cudaErrorStreamCaptureUnsupported;
  free(memory);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  if (too_old()) return cudaErrorInsufficientDriver;
  *status = capturing() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

namespace cuda_on_cpu {

Counts counts;
std::atomic<int> driver_version = CUDART_VERSION;

void Recording::begin() {
  Recording* none = nullptr;
  if (!open_recording.compare_exchange_strong(none, this))
    throw std::logic_error("cuda_on_cpu: another capture is under way");
}

void Recording::end() {
  Recording* own = this;
  if (!open_recording.compare_exchange_strong(own, nullptr))
    throw std::logic_error("cuda_on_cpu: this capture has not begun");
}

void Recording::replay(cudaStream_t stream) const {
  for (const auto& kernel : kernels_) queue(of_current_device(stream), [&kernel] { kernel(); });
}

Recording* under_way() { return open_recording.load(); }

bool runs_at_once() { return !capturing() && !is_delayed(); }

void submit(cudaStream_t stream, std::function<void()> kernel) {
  if (Recording* recording = under_way()) return recording->add(std::move(kernel));
  queue(of_current_device(stream), std::move(kernel));
}

}  // namespace cuda_on_cpu
