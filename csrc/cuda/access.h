#pragma once
// Eight elements of an array in memory, read and decoded, or encoded and written, in one call.
#include "cuda/convert.h"

namespace amp_mp::cuda {

template <FormatSet Formats>
__device__ __forceinline__ void load(float (&x)[kPack], const Array& from, int64_t at, int n,
                                     bool whole) {
  Held<Formats> held;
  held.read(from, at, n, whole);
  held.decode(from.format, x);
}

template <FormatSet Formats>
__device__ __forceinline__ void store(const Array& to, const float (&x)[kPack], int64_t at, int n,
                                      bool whole, uint64_t random = 0) {
  Held<Formats> held;
  held.encode(to.format, x, n, random);
  held.write(to, at, n, whole);
}

// Stores weights or moments, which saturate in float16.
template <FormatSet Formats>
__device__ __forceinline__ void store_history(const Array& to, const float (&x)[kPack], int64_t at,
                                              int n, bool whole, uint64_t random = 0) {
  const bool clamp = saturates(to.format);
  float y[kPack];
  for (int k = 0; k < kPack; ++k) y[k] = clamp ? saturate(x[k]) : x[k];
  store<Formats>(to, y, at, n, whole, random);
}

}  // namespace amp_mp::cuda
