#pragma once
// The inner loop of the averaging pass.
#include "cpu/access.h"

namespace amp_mp::cpu {
namespace {

template <class To, class From>
AMP_MP_BOTH void average_elements(To to, From from, Averaging averaging, int n) {
  for (int i = 0; i < n; ++i) to.put(i, averaging(to.get(i), from.get(i)), 0);
}

template <class To, class From>
AMP_MP_OWN void average_as(const Transfer& t, int64_t begin, int64_t end, Averaging averaging) {
  alignas(64) float old[kTile], x[kTile];
  // Without a tile the loop is long, and its constants are loaded once.
  constexpr bool has_tile = std::is_same_v<To, Floats> || std::is_same_v<From, Floats>;
  constexpr int64_t kPiece = has_tile ? kTile : 1 << 20;
  for (int64_t i = begin; i < end; i += kPiece) {
    const int n = int(end - i < kPiece ? end - i : kPiece);
    const To to = open<To>(t.to, i, old, n);
    if (t.to.format == Format::float16_split32) {
      const int16_t* remainder = at_element<int16_t>(t.to.second, i);
      for (int k = 0; k < n; ++k) old[k] = average_of_float16(old[k], remainder[k]);
    }
    average_elements(to, open<From>(t.from, i, x, n), averaging, n);
    close(to, t.to, i, old, old, nullptr, n);
  }
}

// An average of bfloat16 weights, and what their masters are stored in, are converted inside the
// loop.
AMP_MP_OWN void average(const Transfer& t, int64_t begin, int64_t end, Averaging averaging) {
  using Exact = Joined<Split32>;
  if (t.to.format != Format::bfloat16_split32)
    return average_as<Floats, Floats>(t, begin, end, averaging);
  switch (t.from.format) {
    case Format::bfloat16_split32: return average_as<Exact, Exact>(t, begin, end, averaging);
    case Format::bfloat16_float32:
      return average_as<Exact, Joined<WholeMaster>>(t, begin, end, averaging);
    case Format::bfloat16: return average_as<Exact, LowGrad>(t, begin, end, averaging);
    default: return average_as<Exact, Floats>(t, begin, end, averaging);
  }
}

}  // namespace
}  // namespace amp_mp::cpu
