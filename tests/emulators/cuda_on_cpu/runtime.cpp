#include "runtime.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace {

constexpr int kDevices = 2, kMultiprocessors = 4;
thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
std::atomic<cuda_on_cpu::Recording*> open_recording = nullptr;

bool too_old() { return cuda_on_cpu::driver_version < CUDART_VERSION; }
bool capturing() { return open_recording.load() != nullptr; }

cuda_on_cpu::StreamId of_current_device(cudaStream_t stream) {
  return {current_device, reinterpret_cast<intptr_t>(stream)};
}

using cuda_on_cpu::noted;

struct HostPieces {
  std::mutex mutex;
  std::map<void*, std::pair<size_t, int>> all;  // bytes and device
  int64_t freed_too_early = 0;
};
HostPieces& host_pieces = *new HostPieces;  // never destroyed, as tensors may live until the end

template <class Finish>
cudaError_t synchronise(const Finish& finish) {
  if (capturing()) return noted(cudaErrorStreamCaptureUnsupported);
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

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
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
  if (device < 0 || device >= kDevices) return noted(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= kDevices) return noted(cudaErrorInvalidDevice);
  if (attribute == cudaDevAttrCanMapHostMemory)
    *value = cuda_on_cpu::maps_host_memory;
  else if (attribute == cudaDevAttrMultiProcessorCount)
    *value = kMultiprocessors;
  else
    return noted(cudaErrorInvalidValue);
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
  if (too_old()) return noted(cudaErrorInsufficientDriver);
  if (flags & ~(cudaHostAllocPortable | cudaHostAllocMapped)) return noted(cudaErrorInvalidValue);
  if (capturing() && capture_mode != cudaStreamCaptureModeRelaxed)
    return noted(cudaErrorStreamCaptureUnsupported);
  *memory = cuda_on_cpu::has_host_memory ? malloc(bytes) : nullptr;
  if (!*memory) return bytes == 0 ? cudaSuccess : noted(cudaErrorMemoryAllocation);
  memset(*memory, 0xFF, bytes);
  const std::lock_guard lock(host_pieces.mutex);
  host_pieces.all[*memory] = {bytes, current_device};
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* memory) {
  if (capturing()) return noted(cudaErrorStreamCaptureUnsupported);
  const std::lock_guard lock(host_pieces.mutex);
  const auto found = host_pieces.all.find(memory);
  if (found == host_pieces.all.end()) return noted(cudaErrorInvalidValue);
  const auto [bytes, device] = found->second;
  host_pieces.freed_too_early += !cuda_on_cpu::is_idle(device);
  host_pieces.all.erase(found);
  memset(memory, 0xFF, bytes);
  free(memory);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  if (!stream) cuda_on_cpu::asked_device = current_device;
  if (too_old()) return noted(cudaErrorInsufficientDriver);
  *status = capturing() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

namespace cuda_on_cpu {

cudaError_t noted(cudaError_t error) { return last_error = error; }

Counts counts;
std::atomic<int> asked_device = -1;
std::atomic<bool> has_host_memory = true, maps_host_memory = true;
std::atomic<int> driver_version = CUDART_VERSION;

HostMemory host_memory() {
  const std::lock_guard lock(host_pieces.mutex);
  HostMemory found{{}, host_pieces.freed_too_early};
  for (const auto& [memory, piece] : host_pieces.all) found.bytes.push_back(int64_t(piece.first));
  return found;
}

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
