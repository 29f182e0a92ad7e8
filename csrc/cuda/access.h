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
  held.template encode<false>(to.format, x, n, random);
  held.write(to, at, n, whole);
}

// Stores weights or moments, which saturate in float16; returns them as they are stored.
template <FormatSet Formats>
__device__ __forceinline__ Held<Formats> store_history(const Array& to, const float (&x)[kPack],
                                                       int64_t at, int n, bool whole,
                                                       uint64_t random = 0) {
  Held<Formats> held;
  held.template encode<true>(to.format, x, n, random);
  held.write(to, at, n, whole);
  return held;
}

}  // namespace amp_mp::cuda
