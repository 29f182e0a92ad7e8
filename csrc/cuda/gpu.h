#pragma once
// Under nvcc this is CUDA. Under any other compiler it is the tests' emulator, which runs the same
// kernels on a CPU.
#include <cstdint>
#ifdef __CUDACC__
#include <cuda_runtime.h>
// Before a loop: its iterations stay one after the other.
#define AMP_MP_NO_UNROLL _Pragma("unroll 1")
// All of them in line, so that an array that they index stays in registers.
#define AMP_MP_UNROLL _Pragma("unroll")

namespace amp_mp::cuda {

constexpr int kArgumentLimit = CUDART_VERSION >= 12010 ? 32764 : 4096;  // bytes, from sm_70 on

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
                   const Arguments&... arguments) {
  kernel<<<unsigned(blocks), threads, 0, stream>>>(arguments...);
  return cudaGetLastError();
}

// For a pointer that was read from memory: tells the compiler that it points to global memory, for
// which there are better loads and stores. The instruction costs nothing. Without asm the compiler
// removes it, and what it says.
__device__ __forceinline__ void* to_global(void* p) {
  size_t address;
  asm("cvta.to.global.u64 %0, %1;" : "=l"(address) : "l"(p));
  return __cvta_global_to_generic(address);
}

// Tells the compiler what always holds.
__device__ __forceinline__ void assume(bool holds) { __builtin_assume(holds); }

}  // namespace amp_mp::cuda
#else
#include "cuda_on_cpu.h"
#define AMP_MP_NO_UNROLL
#define AMP_MP_UNROLL

namespace amp_mp::cuda {
using cuda_on_cpu::assume;
using cuda_on_cpu::kArgumentLimit;
using cuda_on_cpu::launch;

inline void* to_global(void* p) { return p; }
}  // namespace amp_mp::cuda
#endif
