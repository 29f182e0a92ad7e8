// Conversions of tiles, compiled once for each instruction set as loops.cpp is, whose restrictions
// hold here too.
#include "cpu/convert.h"

#include <type_traits>

namespace amp_mp::cpu {
namespace {

template <Format F>
constexpr bool has(uint32_t property) {
  return kFormats[int(F)].is(property);
}

template <Format F>
AMP_MP_BOTH void decode_as(const Array& from, int64_t at, float* __restrict to, int n) {
  using Data = typename Elements<F>::Data;
  using Second = typename Elements<F>::Second;
  const Data* data = at_element<Data>(from.data, at);
  if constexpr (has<F>(kSplit) && std::is_same_v<Data, float>) {
    join_tile<WholeMaster>(at_element<Second>(from.second, at), data, to, n);
  } else if constexpr (has<F>(kSplit)) {
    join_tile<SplitOf<Second>>(data, at_element<Second>(from.second, at / kPackedIn<Second>), to,
                               n);
  } else if constexpr (has<F>(kGrouped)) {
    decode_groups(data, at_element<Second>(from.second, at / kGroup), to, n);
  } else {
    decode_tile(data, to, n);
  }
}

template <Format F>
AMP_MP_BOTH void encode_as(const float* __restrict from, const Array& to, int64_t at,
                           const uint8_t* __restrict random, int n) {
  using Data = typename Elements<F>::Data;
  using Second = typename Elements<F>::Second;
  Data* data = at_element<Data>(to.data, at);
  if constexpr (has<F>(kSplit) && std::is_same_v<Data, float>) {
    split_tile<WholeMaster>(from, at_element<Second>(to.second, at), data, n);
  } else if constexpr (has<F>(kSplit) && has<F>(kRandom)) {
    split_tile(from, data, at_element<Second>(to.second, at / kPackedIn<Second>), random, n);
  } else if constexpr (has<F>(kSplit)) {
    split_tile<SplitOf<Second>>(from, data, at_element<Second>(to.second, at), n);
  } else if constexpr (has<F>(kGrouped)) {
    encode_groups(from, data, at_element<Second>(to.second, at / kGroup), random, n);
  } else if constexpr (has<F>(kRandom)) {
    encode_tile(from, data, random, n);
  } else {
    encode_tile(from, data, n);
  }
}

}  // namespace

namespace AMP_MP_ISA::of_any_format {

void decode_tile(Array from, int64_t at, float* __restrict to, int n) {
#define AMP_MP_DECODE(name, ...) \
  case Format::name: return decode_as<Format::name>(from, at, to, n);
  switch (from.format) { AMP_MP_FOR_EACH_FORMAT(AMP_MP_DECODE) }
#undef AMP_MP_DECODE
}

void encode_tile(const float* __restrict from, Array to, int64_t at,
                 const uint8_t* __restrict random, int n) {
#define AMP_MP_ENCODE(name, ...) \
  case Format::name: return encode_as<Format::name>(from, to, at, random, n);
  switch (to.format) { AMP_MP_FOR_EACH_FORMAT(AMP_MP_ENCODE) }
#undef AMP_MP_ENCODE
}

void store_tile(const float* from, Array to, int64_t at, float* spare, const uint8_t* random,
                int n) {
  if (saturates(to.format)) {
    for (int i = 0; i < n; ++i) spare[i] = saturate(from[i]);
    from = spare;
  }
  encode_tile(from, to, at, random, n);
}

}  // namespace AMP_MP_ISA::of_any_format
}  // namespace amp_mp::cpu
