#pragma once
// How the update loop gets and puts the elements of an array. Arrays whose conversion is a few
// integer operations (LowGrad, Joined, LowMoment, LowSquare) are converted inside the loop and
// never leave the registers. All others are Floats: used in place if they are float32, or else
// decoded into a tile in the cache before the loop and stored after it.
#include <type_traits>

#include "cpu/convert.h"

namespace amp_mp::cpu {
namespace {

// These structs are passed by value and hold __restrict pointers: through a reference the compiler
// would have to assume that the loop's stores change the pointers, and the loop would stay scalar.
struct Floats {
  float* __restrict at;
  AMP_MP_BOTH float get(int i) const { return at[i]; }
  AMP_MP_BOTH void put(int i, float x, uint32_t) const { at[i] = x; }
};

struct Nothing {};  // a state that the rule does not have

struct LowGrad {
  const bfloat16* __restrict at;
  AMP_MP_BOTH float get(int i) const { return decode(at[i]); }
};

template <class Split>
struct Joined {  // a bfloat16 weight and its master
  bfloat16* __restrict high;
  typename Split::Master* __restrict master;
  AMP_MP_BOTH float get(int i) const { return Split::join(high[i], master[i]); }
  AMP_MP_BOTH void put(int i, float x, uint32_t) const { Split::split(x, high[i], master[i]); }
};

template <Format F>
struct Low {  // a state of one stochastic 16-bit array
  static constexpr Format kFormat = F;
  using Data = typename Elements<F>::Data;
  Data* __restrict at;
  AMP_MP_BOTH float get(int i) const { return decode(at[i]); }
  AMP_MP_BOTH void put(int i, float x, uint32_t random) const { at[i] = encode<Data>(x, random); }
};
using LowMoment = Low<Format::bfloat16_stochastic>;
using LowSquare = Low<Format::ue8m8>;

// n elements from `at` on as float32: in place if the array is float32, else decoded into `tile`.
AMP_MP_BOTH float* open_tile(Array from, int64_t at, float* tile, int n) {
  if (from.format == Format::float32) return static_cast<float*>(from.data) + at;
  decode_tile(from, at, tile, n);
  return tile;
}

template <class Access>
AMP_MP_BOTH Access open(Array array, int64_t at, float* tile, int n) {
  if constexpr (std::is_same_v<Access, Nothing>) {
    return {};
  } else if constexpr (std::is_same_v<Access, Floats>) {
    return {open_tile(array, at, tile, n)};
  } else if constexpr (requires(Access a) { a.master; }) {
    constexpr bool is_whole =
        std::is_same_v<Access, Joined<WholeMaster>>;  // the weight comes second
    Access a = {};
    a.high = at_element<bfloat16>(is_whole ? array.second : array.data, at);
    a.master = static_cast<decltype(a.master)>(is_whole ? array.data : array.second) + at;
    return a;
  } else {
    Access a = {};
    a.at = static_cast<decltype(a.at)>(array.data) + at;
    return a;
  }
}

// Stores what `open` has decoded into the tile.
template <class Access>
AMP_MP_BOTH void close(const Access& access, Array array, int64_t at, float* tile, float* spare,
                       const uint8_t* random, int n) {
  if constexpr (std::is_same_v<Access, Floats>) {
    if (access.at == tile) store_tile(tile, array, at, spare, random, n);
  }
}

}  // namespace
}  // namespace amp_mp::cpu
