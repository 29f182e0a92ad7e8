#pragma once
// Under nvcc this is CUDA. Under any other compiler it is the tests' emulator, which runs the same
// kernels on a CPU.
#include <cstdint>
#ifdef __CUDACC__
#include <cuda_runtime.h>

namespace amp_mp::cuda {

constexpr int kArgumentLimit = CUDART_VERSION >= 12010 ? 32764 : 4096;  // bytes, from sm_70 on

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
                   const Arguments&... arguments) {
  kernel<<<unsigned(blocks), threads, 0, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace amp_mp::cuda
#else
#include "cuda_on_cpu.h"

namespace amp_mp::cuda {
using cuda_on_cpu::kArgumentLimit;
using cuda_on_cpu::launch;
}  // namespace amp_mp::cuda
#endif
