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
    case Format::float16_root: return load_as<float16_root>(x, from.data, at, n, wide);
  }
}

template <class T, class Encode>
__device__ __forceinline__ void store_as(void* data, const float (&x)[kPack], int64_t at, int n,
                                         bool wide, const Encode& encode) {
  T raw[kPack];
  for (int k = 0; k < kPack; ++k) raw[k] = encode(x[k]);
  store(static_cast<T*>(data) + at, raw, n, wide);
}

__device__ __forceinline__ void store(Span to, const float (&x)[kPack], int64_t at, int n,
                                      bool wide) {
  switch (to.format) {
    case Format::float32: return store(static_cast<float*>(to.data) + at, x, n, wide);
    case Format::float16:
      return store_as<float16>(to.data, x, at, n, wide, [](float v) { return encode_float16(v); });
    case Format::bfloat16:
      return store_as<bfloat16>(to.data, x, at, n, wide,
                                [](float v) { return encode_bfloat16(v); });
    case Format::float16_root:
      return store_as<float16_root>(to.data, x, at, n, wide,
                                    [](float v) { return encode_float16_root(v); });
  }
}

// As weights and history are stored: float16 saturates.
__device__ __forceinline__ void store_history(Span to, const float (&x)[kPack], int64_t at, int n,
                                              bool wide) {
  if (!saturates(to.format)) return store(to, x, at, n, wide);
  store_as<float16>(to.data, x, at, n, wide, [](float v) { return encode_float16(saturate(v)); });
}

}  // namespace amp_mp::cuda
