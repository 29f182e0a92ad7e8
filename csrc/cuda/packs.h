#pragma once
// Eight elements a thread, decoded to float32 and encoded from it, in 16-byte pieces where the
// addresses allow it. `wide` is uniform over a block, so the branch costs nothing.
#include "core/formats.h"
#include "cuda/gpu.h"
#include "plan.h"

namespace amp_mp::cuda {

constexpr int kPack = 8;

__device__ __forceinline__ bool is_wide(const void* p) {
  return (reinterpret_cast<uintptr_t>(p) & 15) == 0;
}

template <class T>
__device__ __forceinline__ void load(T (&out)[kPack], const T* p, int n, bool wide) {
  if (wide) {
    uint4 raw[sizeof out / 16];
    for (int i = 0; i < int(sizeof out / 16); ++i) raw[i] = reinterpret_cast<const uint4*>(p)[i];
    memcpy(out, raw, sizeof out);
  } else {
    for (int k = 0; k < kPack;
         ++k)  // a constant trip count: a dynamic one puts `out` in local memory
      if (k < n) out[k] = p[k];
  }
}

template <class T>
__device__ __forceinline__ void store(T* p, const T (&in)[kPack], int n, bool wide) {
  if (wide) {
    uint4 raw[sizeof in / 16];
    memcpy(raw, in, sizeof in);
    for (int i = 0; i < int(sizeof in / 16); ++i) reinterpret_cast<uint4*>(p)[i] = raw[i];
  } else {
    for (int k = 0; k < kPack; ++k)
      if (k < n) p[k] = in[k];
  }
}

template <class T>
__device__ __forceinline__ void load_as(float (&x)[kPack], const void* data, int64_t at, int n,
                                        bool wide) {
  T raw[kPack] = {};
  load(raw, static_cast<const T*>(data) + at, n, wide);
  for (int k = 0; k < kPack; ++k) x[k] = decode(raw[k]);
}

__device__ __forceinline__ void load(float (&x)[kPack], Span from, int64_t at, int n, bool wide) {
  switch (from.format) {
    case Format::float32: return load_as<float>(x, from.data, at, n, wide);
    case Format::float16: return load_as<float16>(x, from.data, at, n, wide);
    case Format::bfloat16: return load_as<bfloat16>(x, from.data, at, n, wide);
  }
}

__device__ __forceinline__ void store(Span to, const float (&x)[kPack], int64_t at, int n,
                                      bool wide) {
  if (to.format == Format::float32) {
    store(static_cast<float*>(to.data) + at, x, n, wide);
  } else if (to.format == Format::float16) {
    float16 raw[kPack];
    for (int k = 0; k < kPack; ++k) raw[k] = encode_float16(x[k]);
    store(static_cast<float16*>(to.data) + at, raw, n, wide);
  } else {
    bfloat16 raw[kPack];
    for (int k = 0; k < kPack; ++k) raw[k] = encode_bfloat16(x[k]);
    store(static_cast<bfloat16*>(to.data) + at, raw, n, wide);
  }
}

}  // namespace amp_mp::cuda
