#pragma once
// Marks functions that are compiled for the host and for CUDA devices.
#ifdef __CUDACC__
#define AMP_MP_BOTH __host__ __device__ __forceinline__
#else
#define AMP_MP_BOTH inline __attribute__((always_inline))
#endif
