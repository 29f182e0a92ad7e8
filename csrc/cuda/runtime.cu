// What is asked of the CUDA runtime besides launches.
#include "cuda/gpu.h"
#include "cuda/passes.h"
#include "cuda/table.h"

namespace amp_mp::cuda {

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) == cudaSuccess)
    return status == cudaStreamCaptureStatusActive;
  cudaGetLastError();  // or the next launch would be blamed for it
  return false;
}

const char* synchronize(void* stream) {
  return message(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
}

void* allocate_for_both(size_t bytes) {
  void* memory = nullptr;
  // One address for host and devices, as on every 64-bit system.
  const auto flags = cudaHostAllocMapped | cudaHostAllocPortable;
  return cudaHostAlloc(&memory, bytes, flags) == cudaSuccess ? memory : nullptr;
}

}  // namespace amp_mp::cuda
