#pragma once
// Which weights a pass changes, one bit each, and a sum of all weights, which tells whether
// anything else has written one.
//
// What is compared are 16-bit numbers: a weight in low precision as it is stored, of a float32
// weight what it rounds to. Bit i % 8 of byte i / 8 is set where number i becomes another.
//
// The sum is that of all numbers, as signed integers, each times a coefficient of its place, modulo
// 2^32. A pass that changes numbers adds what the new ones make more than the old. Coefficients are
// odd, so one number that is written always changes the sum; of writes to several one in 2^32 goes
// unseen, and one in 2^16 of those that do nothing but turn signs. By the same sum, made anew in
// each step, a weight's record knows whether its master is still of the weight
// (torch/weights/weight.h).
#include "core/formats.h"

namespace amp_mp {

// What a pass updates besides the weights: their sum, and behind it the bits, in the order of the
// weights' memory. Null for nothing.
struct Changes {
  uint64_t* sum = nullptr;           // of which the lower half is used
  Format format = Format::bfloat16;  // of the numbers: float16 or bfloat16

  AMP_MP_BOTH uint8_t* bits() const { return reinterpret_cast<uint8_t*>(sum + 1); }
  AMP_MP_BOTH uint64_t* words() const { return sum + 1; }  // the same, 64 weights each
};

// The coefficient of number i is that of its place in a tile of 256, of 16 bits, times the tile's.
constexpr int kChangesTile = 256;
AMP_MP_BOTH constexpr uint32_t odd_of(uint32_t i) {
  const uint32_t mixed = (i + 1) * 0x9E3779B1u;
  return (mixed ^ mixed >> 15) * 0x85EBCA6Bu | 1u;
}
AMP_MP_BOTH constexpr int16_t coefficient_in_tile(int i) {
  return int16_t(odd_of(uint32_t(i)) >> 16 | 1u);
}
AMP_MP_BOTH constexpr uint32_t coefficient_of_tile(int64_t tile) { return odd_of(uint32_t(tile)); }

// The number by which a float32 weight is compared. It saturates nowhere, as Tensor.to.
AMP_MP_BOTH uint16_t compared(float weight, Format format) {
  return format == Format::bfloat16 ? encode<bfloat16>(weight).bits : encode<float16>(weight).bits;
}

}  // namespace amp_mp
