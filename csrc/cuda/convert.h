#pragma once
// Eight elements of any format to float32 and back. Reading and decoding are apart: a kernel asks
// for all its arrays before it looks at the first, or the memory would have one request at a time.
#include "cuda/pack8.h"

namespace amp_mp::cuda {

// Sets of formats, for code that is compiled for those an array may have.
template <Format F>
constexpr uint32_t kOnly = 1u << int(F);
constexpr uint32_t kAnyFormat = (1u << kFormats) - 1;
constexpr uint32_t kGradFormats =
    kOnly<Format::float32> | kOnly<Format::float16> | kOnly<Format::bfloat16>;
constexpr uint32_t kSplitFormats = kOnly<Format::bfloat16_split32> |
                                   kOnly<Format::bfloat16_split24> |
                                   kOnly<Format::float16_split32> | kOnly<Format::float16_split24>;
constexpr uint32_t kMasterFormats = kGradFormats | kSplitFormats |
                                    kOnly<Format::float16_stochastic> |
                                    kOnly<Format::bfloat16_stochastic>;
constexpr uint32_t kSquareFormats = kGradFormats | kOnly<Format::float16_root> |
                                    kOnly<Format::bfloat16_stochastic> | kOnly<Format::ue8m8>;
constexpr uint32_t kStateFormats = kSquareFormats | kOnly<Format::m8>;  // of state 0

template <uint32_t Formats>
struct Held {
  static constexpr bool kSplits = (Formats & kSplitFormats) != 0;
  static constexpr bool kGroups = (Formats & kOnly<Format::m8>) != 0;
  Pack8 data, rest;
  float scale;

  __device__ __forceinline__ void read(const Array& from, int64_t at, int n, bool whole) {
    data = cuda::read(from.data, at, width_of(from.format), n, whole);
    if constexpr (kSplits) rest = cuda::read(from.rest, at, rest_width_of(from.format), n, whole);
    if constexpr (kGroups)
      scale = from.format == Format::m8 && n > 0
                  ? amp_mp::decode(static_cast<const bfloat16*>(from.rest)[at / kGroup])
                  : 0.0f;
  }

  __device__ __forceinline__ void decode(Format f, float (&x)[kPack]) const {
    const auto each = [&](const auto& one) {
      for (int k = 0; k < kPack; ++k) x[k] = one(k);
    };
    const auto h = [&](int k) { return float16{uint16_t(data.half(k))}; };
    const auto b = [&](int k) { return bfloat16{uint16_t(data.half(k))}; };
    if (f == Format::float32) return each([&](int k) { return from_bits(data.word[k]); });
    if (f == Format::bfloat16 || f == Format::bfloat16_stochastic)
      return each([&](int k) { return amp_mp::decode(b(k)); });
    if (f == Format::float16 || f == Format::float16_stochastic)
      return each([&](int k) { return amp_mp::decode(h(k)); });
    if constexpr (kSplits) {
      const auto low = [&](int k) { return int16_t(rest.half(k)); };
      const auto byte = [&](int k) { return int8_t(rest.byte(k)); };
      if (f == Format::bfloat16_split32)
        return each([&](int k) { return Split32::join(b(k), low(k)); });
      if (f == Format::bfloat16_split24)
        return each([&](int k) { return Split24::join(b(k), byte(k)); });
      if (f == Format::float16_split32)
        return each([&](int k) { return join_float16<Split32>(amp_mp::decode(h(k)), low(k)); });
      if (f == Format::float16_split24)
        return each([&](int k) { return join_float16<Split24>(amp_mp::decode(h(k)), byte(k)); });
    }
    if constexpr ((Formats & kOnly<Format::ue8m8>) != 0)
      if (f == Format::ue8m8)
        return each([&](int k) { return amp_mp::decode(ue8m8{uint16_t(data.half(k))}); });
    if constexpr ((Formats & kOnly<Format::float16_root>) != 0)
      if (f == Format::float16_root)
        return each([&](int k) { return amp_mp::decode(float16_root{h(k)}); });
    if constexpr (kGroups)
      if (f == Format::m8) {
        const float step = m8_step(scale);
        return each([&](int k) { return decode_m8(M8{int8_t(data.byte(k))}, step); });
      }
  }

  // The opposite. `random` holds a byte an element for the formats that draw. For m8 every thread
  // of the warp has to come here, n = 0 or not: four side by side own a group.
  __device__ __forceinline__ void encode(Format f, const float (&x)[kPack], int n,
                                         uint64_t random) {
    data = {};
    if constexpr (kSplits) rest = {};
    const auto bits = [&](int k) { return uint32_t(random >> (8 * k)) & 0xFFu; };
    const auto noise = [&](int k) {  // noise_of(bits(k)) in one instruction
      const auto half = uint32_t(k < 4 ? random : random >> 32);
      return __byte_perm(half, 0x80u, 0x5504u | uint32_t(k % 4) << 4);
    };
    const auto upper = [&](const auto& one) {
      uint32_t rounded[kPack];
      for (int k = 0; k < kPack; ++k) rounded[k] = one(k);
      data.set_upper(rounded);
    };
    const auto halves = [&](const auto& one) {
      for (int k = 0; k < kPack; ++k) data.set_half(k, one(k));
    };
    if (f == Format::float32) {
      for (int k = 0; k < kPack; ++k) data.word[k] = to_bits(x[k]);
      return;
    }
    if (f == Format::bfloat16) return upper([&](int k) { return round_bfloat16(x[k]); });
    if (f == Format::float16) return halves([&](int k) { return encode_float16(x[k]).bits; });
    if constexpr ((Formats & kOnly<Format::bfloat16_stochastic>) != 0)
      if (f == Format::bfloat16_stochastic)
        return upper([&](int k) { return round_bfloat16(x[k], noise(k)); });
    if constexpr ((Formats & kOnly<Format::float16_stochastic>) != 0)
      if (f == Format::float16_stochastic)
        return halves([&](int k) { return encode_float16(x[k], bits(k)).bits; });
    if constexpr ((Formats & kOnly<Format::ue8m8>) != 0)
      if (f == Format::ue8m8) return upper([&](int k) { return round_ue8m8(x[k], noise(k)); });
    if constexpr ((Formats & kOnly<Format::float16_root>) != 0)
      if (f == Format::float16_root)
        return halves([&](int k) { return encode_float16_root(x[k]).root.bits; });
    if constexpr (kSplits) {
      if (f == Format::bfloat16_split32) return split_bfloat16<Split32>(x);
      if (f == Format::bfloat16_split24) return split_bfloat16<Split24>(x);
      if (f == Format::float16_split32) return split_float16<Split32>(x);
      if (f == Format::float16_split24) return split_float16<Split24>(x);
    }
    if constexpr (kGroups)
      if (f == Format::m8) group(x, n, random);
  }

  __device__ __forceinline__ void write(const Array& to, int64_t at, int n, bool whole) const {
    cuda::write(to.data, data, at, width_of(to.format), n, whole);
    if constexpr (kSplits) cuda::write(to.rest, rest, at, rest_width_of(to.format), n, whole);
    if constexpr (kGroups)
      if (to.format == Format::m8 && n > 0 && at % kGroup == 0)
        static_cast<bfloat16*>(to.rest)[at / kGroup] = encode_bfloat16(scale);
  }

 private:
  template <class Split>
  __device__ __forceinline__ void set_rest(int k, typename Split::Rest r) {
    if constexpr (sizeof r == 2) {
      rest.set_half(k, uint16_t(r));
    } else {
      rest.set_byte(k, uint8_t(r));
    }
  }

  template <class Split>
  __device__ __forceinline__ void split_bfloat16(const float (&x)[kPack]) {
    uint32_t whole[kPack], upper[kPack];
    for (int k = 0; k < kPack; ++k) {
      whole[k] = Split::round(x[k]);
      upper[k] = whole[k] + 0x8000u;
    }
    data.set_upper(upper);
    if constexpr (sizeof(typename Split::Rest) == 2) {
      rest.set_lower(whole);
    } else {
      rest.set_bytes_1(whole);
    }
  }

  template <class Split>
  __device__ __forceinline__ void split_float16(const float (&x)[kPack]) {
    for (int k = 0; k < kPack; ++k) {
      const float y = saturate(x[k]);
      const float16 high = encode_float16(y);
      data.set_half(k, high.bits);
      set_rest<Split>(k, rest_of_float16<Split>(y, amp_mp::decode(high)));
    }
  }

  __device__ __forceinline__ void group(const float (&x)[kPack], int n, uint64_t random) {
    constexpr int kThreadsOfGroup = kGroup / kPack;
    uint32_t most = 0;
    for (int k = 0; k < kPack; ++k) {
      const uint32_t magnitude = k < n ? to_bits(x[k]) & kMagnitude : 0;
      most = magnitude > most ? magnitude : most;
    }
    for (int d = kThreadsOfGroup / 2; d > 0; d /= 2) {
      const uint32_t other = __shfl_xor_sync(kWarp, most, d, kThreadsOfGroup);
      most = other > most ? other : most;
    }
    __syncwarp(kWarp);  // one of the four will write the scale that all have read
    scale = amp_mp::decode(m8_scale(most));
    const float inverse = m8_inverse(scale);
    uint32_t rounded[kPack];
    for (int k = 0; k < kPack; ++k)
      rounded[k] = round_m8(x[k], inverse, uint32_t(random >> (8 * k)) & 0xFFu);
    data.set_bytes_1(rounded);
  }
};

template <uint32_t Formats>
__device__ __forceinline__ void load(float (&x)[kPack], const Array& from, int64_t at, int n,
                                     bool whole) {
  Held<Formats> held;
  held.read(from, at, n, whole);
  held.decode(from.format, x);
}

template <uint32_t Formats>
__device__ __forceinline__ void store(const Array& to, const float (&x)[kPack], int64_t at, int n,
                                      bool whole, uint64_t random = 0) {
  Held<Formats> held;
  held.encode(to.format, x, n, random);
  held.write(to, at, n, whole);
}

// As weights and history are stored: float16 saturates.
template <uint32_t Formats>
__device__ __forceinline__ void store_history(const Array& to, const float (&x)[kPack], int64_t at,
                                              int n, bool whole, uint64_t random = 0) {
  const bool clamp = saturates(to.format);
  float y[kPack];
  for (int k = 0; k < kPack; ++k) y[k] = clamp ? saturate(x[k]) : x[k];
  store<Formats>(to, y, at, n, whole, random);
}

}  // namespace amp_mp::cuda
