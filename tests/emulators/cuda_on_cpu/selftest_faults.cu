// Kernels that are wrong on purpose: each of these faults must be noticed by some build.
// tests/emulators/test_cuda_on_cpu_shim.py has the table of which build notices which.
#include <cstdio>
#include <cstring>
#include <memory>

#include "cuda_on_cpu.h"

namespace {

using cuda_on_cpu::launch;

constexpr int kThreads = 64;

// Every thread reads what another warp has written, without waiting for it.
__global__ void missing_barrier(int* out) {
  __shared__ int shared[kThreads];
  shared[threadIdx.x] = int(threadIdx.x) + 1;
  out[blockIdx.x * kThreads + threadIdx.x] = shared[kThreads - 1 - threadIdx.x];
}

// Each warp has its own barrier: hangs on some GPUs, passes on others.
__global__ void divergent_barrier(int* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 0;
}

__global__ void unreached_barrier(int* out) {
  if (threadIdx.x == 0) return;
  __syncthreads();
  out[threadIdx.x] = 0;
}

// Every second thread runs the loop once more: all wait at the same line, but in different rounds.
__global__ void unequal_shuffles(int* out) {
  int value = 0;
  for (unsigned i = 0; i < 1 + threadIdx.x % 2; ++i) value += __shfl_down_sync(~0u, 1, 1);
  out[threadIdx.x] = value;
}

__global__ void shuffle_beyond_warp(int* out) {
  out[threadIdx.x] = __shfl_down_sync(~0u, int(threadIdx.x), 16);
}

// As by a wrong bound: the last thread reads one element behind the array.
__global__ void off_by_one_read(const int* in, int* out) { out[threadIdx.x] = in[threadIdx.x + 1]; }

// Through a pointer, so that UBSan's check of array indices cannot help.
__global__ void shared_overflow(int* out) {
  __shared__ int shared[kThreads];
  int* volatile start = shared;
  start[threadIdx.x + 1] = 0;
  __syncthreads();
  out[threadIdx.x] = shared[threadIdx.x];
}

// The same value from every block: no check of values can notice.
__global__ void race_between_blocks(int* out) {
  if (threadIdx.x == 0) out[0] = 7;
}

// All threads of one block write one word, the same value; and not in the first block, where a shim
// that orders too much is not yet found out.
__global__ void race_between_threads(int* out) {
  if (blockIdx.x == 2) out[0] = 7;
}

// The second round overwrites what slow threads still read from the first.
__global__ void reused_shared(int* out) {
  __shared__ int shared;
  for (int round = 1; round <= 2; ++round) {
    if (threadIdx.x == kThreads - 1) shared = round;
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = shared;
  }
}

// Only __syncwarp orders memory. Real threads, and most GPUs, get away with this.
__global__ void shuffle_as_fence(int* out) {
  __shared__ int shared[kThreads];
  shared[threadIdx.x] = 0;
  __shfl_sync(~0u, 0, 0);
  out[blockIdx.x * kThreads + threadIdx.x] = shared[threadIdx.x ^ 1];
}

}  // namespace

int run_fault(const char* name) {
  const auto is = [name](const char* other) { return strcmp(name, other) == 0; };
  int elements[2 * kThreads] = {};
  int* const out = elements;
  if (is("missing_barrier")) {
    launch(missing_barrier, 2, kThreads, nullptr, out);
    for (int i = 0; i < 2 * kThreads; ++i) {
      if (out[i] != kThreads - i % kThreads) return printf("wrong: element %d\n", i), 1;
    }
  } else if (is("divergent_barrier")) {
    launch(divergent_barrier, 1, kThreads, nullptr, out);
  } else if (is("unreached_barrier")) {
    launch(unreached_barrier, 1, kThreads, nullptr, out);
  } else if (is("unequal_shuffles")) {
    launch(unequal_shuffles, 1, kThreads, nullptr, out);
  } else if (is("shuffle_beyond_warp")) {
    launch(shuffle_beyond_warp, 1, 8, nullptr, out);
  } else if (is("off_by_one_read")) {
    const std::unique_ptr<int[]> in(new int[kThreads]());
    launch(off_by_one_read, 1, kThreads, nullptr, in.get(), out);
  } else if (is("shared_overflow")) {
    launch(shared_overflow, 1, kThreads, nullptr, out);
  } else if (is("race_between_blocks")) {
    launch(race_between_blocks, 2, kThreads, nullptr, out);
  } else if (is("race_between_threads")) {
    launch(race_between_threads, 3, kThreads, nullptr, out);
  } else if (is("reused_shared")) {
    launch(reused_shared, 2, kThreads, nullptr, out);
  } else if (is("shuffle_as_fence")) {
    launch(shuffle_as_fence, 2, kThreads, nullptr, out);
  } else {
    return 2;
  }
  return 0;
}
