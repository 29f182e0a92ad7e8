// Proves of the shim what the library's kernels do not show. Without an argument: launches that
// CUDA refuses, and captured ones: not run at once, repeatable, with the arguments of their time.
// With the name of a fault (selftest_faults.cu): a kernel that is wrong in that way. Exits with 0
// if nothing was noticed, with 1 if a value is wrong, with 2 for an unknown name.
#include <cstdio>
#include <utility>

#include "cuda_on_cpu.h"

int run_fault(const char* name);

namespace {

using cuda_on_cpu::launch;

struct Step {
  int by;
};

__global__ void add_kernel(const Step __grid_constant__ step, int* sum) {
  if (threadIdx.x == 0) *sum += step.by;
}

// The number of the first expectation that is not met, or 0.
int first_unmet() {
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
  for (const auto& [blocks, threads] : {std::pair{0, 32}, {1, 0}, {1, 1025}})
    expect(launch(add_kernel, blocks, threads, nullptr, Step{1000}, &sum) ==
           cudaErrorInvalidConfiguration);
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
  expect(cudaGetLastError() == cudaErrorStreamCaptureUnsupported);
  expect(cudaGetLastError() == cudaSuccess);
  return failed;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) return run_fault(argv[1]);
  const int unmet = first_unmet();
  if (unmet) printf("wrong: expectation %d\n", unmet);
  return unmet != 0;
}
