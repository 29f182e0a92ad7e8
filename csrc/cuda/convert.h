#pragma once
// Eight elements of any format to float32 and back. Reading and decoding are separate functions, so
// that a kernel requests all its arrays before it waits for the first.
#include "cuda/pack8.h"

namespace amp_mp::cuda {

// Eight elements of an array. `Formats` are those that the array may have: nothing is compiled for
// the others.
template <FormatSet Formats>
struct Held {
  using F = Format;
  static constexpr bool kSplits = (Formats & kSplitFormats) != 0;
  static constexpr bool kNarrow = (Formats & kWidth1) != 0;
  // The word of data that has a group's scale, behind its codes, as it lies in memory: decoding it
  // while reading would wait for it before the next array is requested.
  static constexpr int kScale = 2;
  Pack8 data, second;

  // Whether f is one of `Some`; false at compile time if none of them is in Formats.
  template <Format... Some>
  static __device__ __forceinline__ bool matches(Format f) {
    return ((is_in(Formats, Some) && f == Some) || ...);
  }

  // Calls `use` with the struct of core/groups.h of the format f, if f is grouped.
#define AMP_MP_WITH_GROUP(name, ...) with_group_of<F::name>(f, use);
  template <class Use>
  static __device__ __forceinline__ void with_group(Format f, const Use& use) {
    AMP_MP_FOR_EACH_FORMAT(AMP_MP_WITH_GROUP);
  }
#undef AMP_MP_WITH_GROUP

  __device__ __forceinline__ void read(const Array& from, int64_t at, int n, bool whole) {
    data = cuda::read<kNarrow>(from.data, at, width_of(from.format), n, whole);
    if constexpr (kSplits) {
      second = cuda::read<true>(from.second, at, second_width_of(from.format), n, whole);
      if (matches<F::bfloat16_split20>(from.format))
        second.word[0] = read_nibbles(from.second, at, n, whole);
    }
    with_group(from.format, [&]<class Group>(Group) {
      const auto* scales = static_cast<const typename Group::Scale*>(from.second);
      if (n > 0) data.word[kScale] = raw_of(scales[uint64_t(at) / kGroup]);
    });
  }

  __device__ __forceinline__ void decode(Format f, float (&x)[kPack]) const {
    const auto each = [&](const auto& one) {
      for (int k = 0; k < kPack; ++k) x[k] = one(k);
    };
    const auto half = [&](int k) { return uint16_t(data.half(k)); };
    const auto h = [&](int k) { return amp_mp::decode(float16{half(k)}); };
    const auto b = [&](int k) { return bfloat16{half(k)}; };
    const auto low = [&](int k) { return int16_t(second.half(k)); };
    const auto byte = [&](int k) { return int8_t(second.byte(k)); };
    const auto master = [&](int k) { return from_bits(data.word[k]); };
    const auto weight = [&](int k) { return uint16_t(second.half(k)); };
    if (matches<F::float32>(f)) return each(master);
    if (matches<F::bfloat16, F::bfloat16_stochastic>(f))
      return each([&](int k) { return amp_mp::decode(b(k)); });
    if (matches<F::float16, F::float16_stochastic>(f)) return each(h);
    if (matches<F::bfloat16_float32>(f))
      return each([&](int k) { return WholeMaster::join(bfloat16{weight(k)}, master(k)); });
    if (matches<F::float16_float32>(f))
      return each([&](int k) { return WholeMaster::join(float16{weight(k)}, master(k)); });
    if (matches<F::bfloat16_split32>(f))
      return each([&](int k) { return Split32::join(b(k), low(k)); });
    if (matches<F::bfloat16_split24>(f))
      return each([&](int k) { return Split24::join(b(k), byte(k)); });
    if (matches<F::bfloat16_split20>(f))
      return each([&](int k) {
        return Split20::join(uint32_t(b(k).bits) << 16, second.word[0] >> (4 * k) & 15u);
      });
    if (matches<F::float16_split32>(f))
      return each([&](int k) { return join_float16<Split32>(h(k), low(k)); });
    if (matches<F::float16_split24>(f))
      return each([&](int k) { return join_float16<Split24>(h(k), byte(k)); });
    if (matches<F::ue8m8>(f)) return each([&](int k) { return amp_mp::decode(ue8m8{half(k)}); });
    if (matches<F::float16_root>(f))
      return each([&](int k) { return amp_mp::decode(float16_root{{half(k)}}); });
    with_group(f, [&]<class Group>(Group group) {
      typename Group::Scale raw;
      memcpy(&raw, &data.word[kScale], sizeof raw);
      const uint32_t scale = group.load(raw), base = group.base(scale);
      const bool is_plain = group.is_plain(scale);
      each([&](int k) {
        const float y = group.decode({decltype(Group::Code::code)(data.byte(k))}, base);
        return is_plain ? y : group.special(scale);
      });
    });
  }

  // The opposite. `random` holds one byte for each element if the format is stochastic. For a
  // grouped format every thread of the warp has to call this, with n = 0 too: four neighbours share
  // a group. Weights and moments saturate in float16; gradients do not, or an overflow would go
  // unseen.
  template <bool kSaturates>
  __device__ __forceinline__ void encode(Format f, const float (&x)[kPack], int n,
                                         uint64_t random) {
    data = {};
    if constexpr (kSplits) second = {};
    const auto bits = [&](int k) { return uint32_t(random >> (8 * k)) & 0xFFu; };
    const auto noise = [&](int k) { return noise_at(random, k); };
    const auto set_upper = [&](Pack8& to, const auto& one) {
      uint32_t rounded[kPack];
      for (int k = 0; k < kPack; ++k) rounded[k] = one(k);
      to.set_upper(rounded);
    };
    const auto upper = [&](const auto& one) { set_upper(data, one); };
    const auto halves = [&](const auto& one) {
      for (int k = 0; k < kPack; ++k) data.set_half(k, one(k));
    };
    const auto words = [&] {
      for (int k = 0; k < kPack; ++k) data.word[k] = to_bits(x[k]);
    };
    if (matches<F::float32>(f)) return words();
    if (matches<F::bfloat16>(f)) return upper([&](int k) { return round_bfloat16(x[k]); });
    if (matches<F::float16>(f))
      return halves(
          [&](int k) { return amp_mp::encode<float16>(kSaturates ? saturate(x[k]) : x[k]).bits; });
    if (matches<F::bfloat16_stochastic>(f))
      return upper([&](int k) { return round_bfloat16(x[k], noise(k)); });
    if (matches<F::float16_stochastic>(f))
      return halves([&](int k) { return amp_mp::encode<float16>(x[k], bits(k)).bits; });
    if (matches<F::ue8m8>(f)) return upper([&](int k) { return round_ue8m8(x[k], noise(k)); });
    if (matches<F::float16_root>(f))
      return halves([&](int k) { return amp_mp::encode<float16_root>(x[k]).root.bits; });
    if (matches<F::bfloat16_float32>(f)) {
      words();
      return set_upper(second, [&](int k) { return round_bfloat16(x[k]); });
    }
    if (matches<F::float16_float32>(f)) {
      words();
      for (int k = 0; k < kPack; ++k)
        second.set_half(k, amp_mp::encode<float16>(saturate(x[k])).bits);
      return;
    }
    if (matches<F::bfloat16_split32>(f)) return split_bfloat16<Split32>(x);
    if (matches<F::bfloat16_split24>(f)) return split_bfloat16<Split24>(x);
    if (matches<F::bfloat16_split20>(f)) return split_in_nibbles(x, random);
    if (matches<F::float16_split32>(f)) return split_float16<Split32>(x);
    if (matches<F::float16_split24>(f)) return split_float16<Split24>(x);
    with_group(f, [&](auto group) { encode_group(group, x, n, random); });
  }

  __device__ __forceinline__ void write(const Array& to, int64_t at, int n, bool whole) const {
    cuda::write(to.data, data, at, width_of(to.format), n, whole);
    if constexpr (kSplits) {
      cuda::write(to.second, second, at, second_width_of(to.format), n, whole);
      if (matches<F::bfloat16_split20>(to.format))
        write_nibbles(to.second, second.word[0], at, n, whole);
    }
    with_group(to.format, [&]<class Group>(Group) {
      typename Group::Scale raw;
      memcpy(&raw, &data.word[kScale], sizeof raw);
      auto* scales = static_cast<typename Group::Scale*>(to.second);
      if (n > 0 && at % kGroup == 0) scales[uint64_t(at) / kGroup] = raw;
    });
  }

 private:
  static __device__ __forceinline__ uint32_t raw_of(bfloat16 scale) { return scale.bits; }
  static __device__ __forceinline__ uint32_t raw_of(uint8_t scale) { return scale; }
  template <Format G, class Use>
  static __device__ __forceinline__ void with_group_of(Format f, const Use& use) {
    if constexpr (is_in(Formats & kGroupedFormats, G))
      if (f == G) use(GroupOf<typename Elements<G>::Data>{});
  }

  template <class Split>
  __device__ __forceinline__ void set_remainder(int k, typename Split::Master r) {
    if constexpr (sizeof r == 2) {
      second.set_half(k, uint16_t(r));
    } else {
      second.set_byte(k, uint8_t(r));
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
    if constexpr (sizeof(typename Split::Master) == 2) {
      second.set_lower(whole);
    } else {
      second.set_bytes_1(whole);
    }
  }

  __device__ __forceinline__ void split_in_nibbles(const float (&x)[kPack], uint64_t random) {
    uint32_t upper[kPack], nibbles = 0;
    for (int k = 0; k < kPack; ++k) {
      const uint32_t u = Split20::round(x[k], uint32_t(random >> (8 * k)) & 0xFFu);
      upper[k] = u + 0x8000u;
      nibbles |= Split20::nibble_of(u) << (4 * k);
    }
    data.set_upper(upper);
    second.word[0] = nibbles;
  }

  template <class Split>
  __device__ __forceinline__ void split_float16(const float (&x)[kPack]) {
    for (int k = 0; k < kPack; ++k) {
      const float y = saturate(x[k]);
      const float16 high = amp_mp::encode<float16>(y);
      data.set_half(k, high.bits);
      set_remainder<Split>(k, remainder_of_float16<Split>(y, amp_mp::decode(high)));
    }
  }

  template <class Group>
  __device__ __forceinline__ void encode_group(Group group, const float (&x)[kPack], int n,
                                               uint64_t random) {
    constexpr int kThreadsOfGroup = kGroup / kPack;
    uint32_t most = 0;
    for (int k = 0; k < kPack; ++k) {
      const uint32_t size = k < n ? to_bits(x[k]) & group.kSizeBits : 0;
      most = size > most ? size : most;
    }
    for (int d = kThreadsOfGroup / 2; d > 0; d /= 2) {
      const uint32_t other = __shfl_xor_sync(kWarp, most, d, kThreadsOfGroup);
      most = other > most ? other : most;
    }
    __syncwarp(kWarp);  // all four have read the old scale before one writes the new
    const uint32_t scale = group.scale(most), offset = group.offset(scale);
    uint32_t rounded[kPack];
    for (int k = 0; k < kPack; ++k)
      rounded[k] = group.round(x[k], offset, uint32_t(random >> (8 * k)) & 0xFFu);
    data.set_bytes_1(rounded);
    if (!group.is_plain(scale)) data.word[0] = data.word[1] = 0;
    data.word[kScale] = raw_of(group.store(scale));
  }
};

}  // namespace amp_mp::cuda
