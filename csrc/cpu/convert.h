#pragma once
// Tiles of an array of any format to float32 and back.
#include "cpu/tiles.h"

// Of convert.cpp, once for each instruction set: they are long, and every unit calls them. (In a
// namespace of their own, or they would hide the functions of tiles.h from multiply.cpp.)
namespace amp_mp::cpu::AMP_MP_ISA::of_any_format {

// n elements of an array from `at` on, both multiples of the format's group (FormatInfo).
void decode_tile(Array from, int64_t at, float* to, int n);
// `random` holds one byte for each element if the format is stochastic; else it may be null.
void encode_tile(const float* from, Array to, int64_t at, const uint8_t* random, int n);
// Encodes weights or moments, which saturate in float16. `from` may be `spare`.
void store_tile(const float* from, Array to, int64_t at, float* spare, const uint8_t* random,
                int n);

}  // namespace amp_mp::cpu::AMP_MP_ISA::of_any_format

namespace amp_mp::cpu {
namespace {

using AMP_MP_ISA::of_any_format::decode_tile;
using AMP_MP_ISA::of_any_format::encode_tile;
using AMP_MP_ISA::of_any_format::store_tile;

template <class T>
AMP_MP_BOTH T* at_element(void* data, int64_t at) {
  return static_cast<T*>(data) + at;
}

}  // namespace
}  // namespace amp_mp::cpu
