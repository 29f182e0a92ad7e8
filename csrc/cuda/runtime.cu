// Functions of the CUDA runtime that are needed besides launches.
#include <mutex>
#include <string>

#include "cuda/gpu.h"
#include "cuda/passes.h"
#include "cuda/tensor_table.h"

namespace amp_mp::cuda {
namespace {

// In another mode these calls would be refused while any thread captures, and end that capture.
template <class Call>
const char* relaxed(const Call& call) {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  const cudaError_t error = call();
  cudaThreadExchangeStreamCaptureMode(&mode);
  return message(error);
}

}  // namespace

bool is_built() { return true; }

const char* message(cudaError_t error) {
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // clears the error, or the next launch would report it
  if (error != cudaErrorInsufficientDriver) return cudaGetErrorString(error);
  int driver = 0;
  cudaDriverGetVersion(&driver);
  const auto named = [](int version) {  // 13020 is 13.2
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  };
  static thread_local std::string text;
  text = std::string(cudaGetErrorString(error)) + ": amp_mp's kernels need CUDA " +
         named(CUDART_VERSION) + ", this driver has " + named(driver) +
         "; update the driver, or build amp_mp with a CUDA toolkit that is not newer than it";
  return text.c_str();
}

const char* is_capturing(void* stream, bool& capturing) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  capturing = status == cudaStreamCaptureStatusActive;
  const char* said = message(error);
  // The default stream was asked for while another captures: it is not in that capture.
  return error == cudaErrorStreamCaptureImplicit ? nullptr : said;
}

const char* synchronize(void* stream) {
  return message(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}

const char* allocate_on_host(size_t bytes, void*& memory) {
  // One address for host and devices, as on every 64-bit system.
  constexpr auto kFlags = cudaHostAllocMapped | cudaHostAllocPortable;
  return relaxed([&] { return cudaHostAlloc(&memory, bytes, kFlags); });
}

const char* free_on_host(void* memory) {
  const char* error = relaxed(cudaDeviceSynchronize);
  return error ? error : relaxed([&] { return cudaFreeHost(memory); });
}

bool addresses_host(int device) {
  int can = 0;
  return !message(cudaDeviceGetAttribute(&can, cudaDevAttrCanMapHostMemory, device)) && can;
}

const char* allocate_for_both(size_t bytes, void*& piece) {
  constexpr size_t kSlab = 1 << 16,
                   kAlign = 64;  // one allocation for many pieces, since pinning is slow
  static std::mutex mutex;
  static char* slab = nullptr;
  static size_t used = kSlab;
  const std::lock_guard<std::mutex> lock(mutex);
  if (used + bytes > kSlab) {
    void* memory = nullptr;
    if (bytes > kSlab) return message(cudaErrorInvalidValue);
    if (const char* error = allocate_on_host(kSlab, memory)) return error;
    slab = static_cast<char*>(memory);
    used = 0;
  }
  piece = slab + used;
  used += (bytes + kAlign - 1) / kAlign * kAlign;
  return nullptr;
}

}  // namespace amp_mp::cuda
