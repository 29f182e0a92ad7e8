#pragma once
// The part of CUDA's host interface that the library calls, where kernels run on the CPU; and graph
// capture: while a Recording is open, launches are kept with their arguments instead of run.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "streams.h"

using cudaStream_t = struct CUstream_st*;
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDevice = 101,
  cudaErrorStreamCaptureUnsupported = 900,
  cudaErrorStreamCaptureImplicit = 906
};
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal = 0, cudaStreamCaptureModeRelaxed = 2 };
#define CUDART_VERSION 13000
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16, cudaDevAttrCanMapHostMemory = 19 };
constexpr unsigned cudaHostAllocPortable = 1, cudaHostAllocMapped = 2;

const char* cudaGetErrorString(cudaError_t error);
// The last error of the calling thread since it asked; asking clears it.
cudaError_t cudaGetLastError();

// Two devices, and a current one for each thread. Both have the same memory: the host's.
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);

// As under a capture in CUDA's default mode, none of these four is allowed while one is under way;
// cudaHostAlloc is on a thread whose own mode is relaxed.
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* memory);

// Of any stream: there is one capture at a time, and all work queued meanwhile belongs to it.
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);

namespace cuda_on_cpu {

// For a launch, or any other call: the error to return, which cudaGetLastError tells again.
cudaError_t noted(cudaError_t error);

// Whether cudaHostAlloc finds memory, and whether devices can address it.
extern std::atomic<bool> has_host_memory, maps_host_memory;

// The bytes of each piece of pinned memory that is there now; and how many pieces were freed while
// the device that was current when they were made had work queued.
struct HostMemory {
  std::vector<int64_t> bytes;
  int64_t freed_too_early;
};
HostMemory host_memory();

// The device that was current when cudaStreamIsCapturing was last asked about a default stream.
extern std::atomic<int> asked_device;

// Since the process began. A replay counts its kernels: they run. Bytes of arguments are counted
// when a kernel is launched or recorded.
struct Counts {
  std::atomic<int64_t> launches = 0, argument_bytes = 0, synchronisations = 0;
};
extern Counts counts;

// What a CUDA graph is here. Arguments are copies: what they point at has to live as long.
class Recording {
 public:
  void begin();  // raises std::logic_error where another is under way
  void end();
  void add(std::function<void()> kernel) { kernels_.push_back(std::move(kernel)); }
  // Queues the kernels in the order of recording. The recording has to outlive them.
  void replay(cudaStream_t stream) const;
  size_t size() const { return kernels_.size(); }

 private:
  std::vector<std::function<void()>> kernels_;
};

// The CUDA version of the driver, CUDART_VERSION at first. With an older one each call that needs
// the driver fails.
extern std::atomic<int> driver_version;

Recording* under_way();  // null where nothing is captured

// Whether a launch runs before it returns. Otherwise `submit` takes it: a capture records it, and a
// delayed stream of the current device queues it.
bool runs_at_once();
void submit(cudaStream_t stream, std::function<void()> kernel);

}  // namespace cuda_on_cpu
