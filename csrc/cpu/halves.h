#pragma once
// Tiles of formats of groups as two arrays of float32: the elements at even places and those at odd
// ones. Two codes are read and written as one word, and a group is 16 places of each array.
#include "cpu/random.h"

namespace amp_mp::cpu {
namespace {

// Two neighbours in memory. They may begin at any element.
typedef uint32_t Word __attribute__((may_alias, aligned(2)));  // of 2 bytes each
typedef uint16_t Half __attribute__((may_alias, aligned(1)));  // of 1 byte each

constexpr int kPairs = kTile / 2, kGroupPairs = kGroup / 2, kTileGroups = kTile / kGroup;

// `mask` chooses the bits of a, elsewhere those of b.
AMP_MP_BOTH uint32_t pick(uint32_t mask, uint32_t a, uint32_t b) {
  return (a & mask) | (b & ~mask);
}

struct Halves {
  alignas(64) float even[kPairs], odd[kPairs];
  alignas(64) uint32_t each[kPairs];  // a constant of its group for each place
};

// A constant of each group to all its places. Loops over elements with one scalar for each group
// would be vectors of half the width.
AMP_MP_BOTH void spread_pairs(const uint32_t* __restrict constant, uint32_t* __restrict to) {
  for (int g = 0; g < kTileGroups; ++g)
    for (int i = 0; i < kGroupPairs; ++i) to[g * kGroupPairs + i] = constant[g];
}

typedef uint32_t Lanes __attribute__((vector_size(64)));
AMP_MP_BOTH void larger(const Lanes& a, const Lanes& b, Lanes& result) { result = a > b ? a : b; }
AMP_MP_BOTH void larger_of_both(const Lanes& a, const Lanes& b, const Lanes& low, const Lanes& high,
                                Lanes& result) {
  Lanes first, second;
  shuffle(a, b, low, first);
  shuffle(a, b, high, second);
  larger(first, second, result);
}

// The largest kSizeBits in each group of a tile, whose places are 16 of each array: a tree in which
// each level halves the number of vectors. Reducing each group by itself would take three times the
// instructions.
template <class Group>
AMP_MP_BOTH void largest_of_groups(const float* __restrict even, const float* __restrict odd,
                                   uint32_t* __restrict largest) {
  static_assert(kTileGroups == 8 && kGroupPairs == 16);
  constexpr Lanes low8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}, high8 = low8 + 8;
  constexpr Lanes low4 = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27},
                  high4 = low4 + 4;
  constexpr Lanes low2 = {0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29},
                  high2 = low2 + 2;
  constexpr Lanes low1 = {0, 2, 4, 6, 8, 10, 12, 14, 0, 2, 4, 6, 8, 10, 12, 14}, high1 = low1 + 1;
  Lanes x[8], a[4], b[2], c;
  for (int k = 0; k < 8; ++k) {
    Lanes e, o;
    memcpy(&e, even + k * kGroupPairs, sizeof e);
    memcpy(&o, odd + k * kGroupPairs, sizeof o);
    larger(e & Group::kSizeBits, o & Group::kSizeBits, x[k]);
  }
  for (int k = 0; k < 4; ++k) larger_of_both(x[2 * k], x[2 * k + 1], low8, high8, a[k]);
  for (int k = 0; k < 2; ++k) larger_of_both(a[2 * k], a[2 * k + 1], low4, high4, b[k]);
  larger_of_both(b[0], b[1], low2, high2, c);
  larger_of_both(c, c, low1, high1, c);
  memcpy(largest, &c, kTileGroups * sizeof *largest);
}

// n elements from `at` on; both are multiples of kGroup.
template <class Group>
AMP_MP_BOTH void decode_halves(const Array& from, int64_t at, Halves& to, int n) {
  using Code = typename Group::Code;
  alignas(64) uint32_t scale[kTileGroups] = {}, base[kTileGroups];
  const auto* scales = static_cast<const typename Group::Scale*>(from.second) + at / kGroup;
  const Half* codes = reinterpret_cast<const Half*>(static_cast<const Code*>(from.data) + at);
  for (int g = 0; g < n / kGroup; ++g) scale[g] = Group::load(scales[g]);
  uint32_t bad = 0;
  for (int g = 0; g < kTileGroups; ++g) {
    base[g] = Group::base(scale[g]);
    bad |= Group::is_plain(scale[g]) ? 0u : 1u;
  }
  spread_pairs(base, to.each);
  float* __restrict even = to.even, * __restrict odd = to.odd;
  const uint32_t* __restrict each = to.each;
  for (int i = 0; i < n / 2; ++i) {
    const uint32_t two = codes[i];
    even[i] = Group::decode_top(two << 24, each[i]);
    odd[i] = Group::decode_top(two << 16, each[i]);
  }
  if (!bad) return;
  for (int i = 0; i < n / 2; ++i)
    if (!Group::is_plain(scale[i / kGroupPairs]))
      even[i] = odd[i] = Group::special(scale[i / kGroupPairs]);
}

// `random` has a byte for each element. Overwrites the constants of `from`.
template <class Group>
AMP_MP_BOTH void encode_halves(Halves& from, const Array& to, int64_t at, const uint8_t* random,
                               int n) {
  using Code = typename Group::Code;
  alignas(64) uint32_t scale[kTileGroups], offset[kTileGroups];
  auto* scales = static_cast<typename Group::Scale*>(to.second) + at / kGroup;
  const float* __restrict even = from.even, * __restrict odd = from.odd;
  uint32_t* __restrict each = from.each;
  uint32_t bad = 0;
  largest_of_groups<Group>(even, odd, scale);  // also of groups behind n, which are not stored
  for (int g = 0; g < kTileGroups; ++g) {
    scale[g] = Group::scale(scale[g]);
    offset[g] = Group::offset(scale[g]);
    bad |= Group::is_plain(scale[g]) ? 0u : 1u;
  }
  for (int g = 0; g < n / kGroup; ++g) scales[g] = Group::store(scale[g]);
  spread_pairs(offset, each);
  Half* codes = reinterpret_cast<Half*>(static_cast<Code*>(to.data) + at);
  const Half* bytes = reinterpret_cast<const Half*>(random);
  for (int i = 0; i < n / 2; ++i) {
    const uint32_t two = bytes[i];
    const uint32_t a = Group::round(even[i], each[i], two & 0xFFu),
                   b = Group::round(odd[i], each[i], two >> 8);
    codes[i] = uint16_t(pick(0xFFu, a >> 8, b));
  }
  if (!bad) return;
  for (int i = 0; i < n / 2; ++i)
    if (!Group::is_plain(scale[i / kGroupPairs])) codes[i] = 0;
}

}  // namespace
}  // namespace amp_mp::cpu
