// Captured launches: not run at once, repeatable, with the arguments of their time.
#include "cuda_on_cpu.h"

namespace {

using cuda_on_cpu::launch;

struct Step {
  int by;
};

__global__ void add_kernel(const Step __grid_constant__ step, int* sum) {
  if (threadIdx.x == 0) *sum += step.by;
}

}  // namespace

// The number of the first expectation that is not met, or 0.
int test_capture() {
  int sum = 0, expectation = 0, failed = 0;
  const auto expect = [&](bool met) {
    ++expectation;
    if (!met && failed == 0) failed = expectation;
  };
  cudaStreamCaptureStatus status;
  void* memory = nullptr;
  cuda_on_cpu::Recording recording;
  recording.begin();
  for (Step step{1}; step.by <= 100; step.by *= 10)
    expect(launch(add_kernel, 1, 32, nullptr, step, &sum) == cudaSuccess);
  expect(launch(add_kernel, 0, 32, nullptr, Step{1000}, &sum) == cudaErrorInvalidConfiguration);
  cudaStreamIsCapturing(nullptr, &status);
  expect(status == cudaStreamCaptureStatusActive);
  expect(cudaStreamSynchronize(nullptr) == cudaErrorStreamCaptureUnsupported);
  expect(cudaHostAlloc(&memory, 8, cudaHostAllocMapped) == cudaErrorStreamCaptureUnsupported);
  recording.end();
  cudaStreamIsCapturing(nullptr, &status);
  expect(status == cudaStreamCaptureStatusNone);
  expect(sum == 0 && recording.size() == 3);
  const int64_t before = cuda_on_cpu::counts.launches;
  recording.replay(nullptr);
  recording.replay(nullptr);
  expect(sum == 222);
  expect(cuda_on_cpu::counts.launches == before + 6);
  expect(cudaStreamSynchronize(nullptr) == cudaSuccess);
  expect(cuda_on_cpu::counts.synchronisations == 1);
  expect(cudaHostAlloc(&memory, 8, cudaHostAllocMapped | cudaHostAllocPortable) == cudaSuccess);
  expect(memory && cudaFreeHost(memory) == cudaSuccess);
  return failed;
}
