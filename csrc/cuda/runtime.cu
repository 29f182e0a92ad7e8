// Functions of the CUDA runtime that are needed besides launches.
#include <mutex>

#include "cuda/gpu.h"
#include "cuda/passes.h"
#include "cuda/tensor_table.h"

namespace amp_mp::cuda {

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) == cudaSuccess)
    return status == cudaStreamCaptureStatusActive;
  cudaGetLastError();  // clears the error, or the next launch would report it
  return false;
}

const char* synchronize(void* stream) {
  return message(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}

void* allocate_for_both(size_t bytes) {
  constexpr size_t kSlab = 1 << 16,
                   kAlign = 64;  // one allocation for many pieces, since pinning is slow
  static std::mutex mutex;
  static char* slab = nullptr;
  static size_t used = kSlab;
  const std::lock_guard<std::mutex> lock(mutex);
  if (used + bytes > kSlab) {
    void* memory = nullptr;
    // One address for host and devices, as on every 64-bit system.
    const auto flags = cudaHostAllocMapped | cudaHostAllocPortable;
    if (bytes > kSlab || cudaHostAlloc(&memory, kSlab, flags) != cudaSuccess) return nullptr;
    slab = static_cast<char*>(memory);
    used = 0;
  }
  char* piece = slab + used;
  used += (bytes + kAlign - 1) / kAlign * kAlign;
  return piece;
}

}  // namespace amp_mp::cuda
