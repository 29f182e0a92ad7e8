#pragma once
// What a matrix product does with its float32 sums: scales, adds, rounds and stores them.
#include "cpu/multiply.h"

namespace amp_mp::cpu {
namespace {

template <class Low>
AMP_MP_BOTH const Low* at(const Matrix& m, int64_t i, int64_t j) {
  return static_cast<const Low*>(m.data) + i * m.row + j * m.column;
}

// Rounds alpha * sums + beta * c into `to` for a pack, or what `left` columns have of it. Out of
// line, so that the loop around it has registers.
template <class Low>
AMP_MP_OWN void round_any(const Product& p, int64_t row, int64_t column, int left,
                          Lane (&half)[2]) {
  const int n = left < kPack ? left : kPack;
  Low own[kPack];
  if (p.c.data) {
    const Low* added = at<Low>(p.c, row, column);
    if (n < kPack || p.c.column != 1) {
      for (int j = 0; j < kPack; ++j) own[j] = j < n ? added[j * p.c.column] : Low{};
      added = own;
    }
    Lane first, second;
    unpack(added, first, second);
    half[0] = p.alpha * half[0] + p.beta * first;
    half[1] = p.alpha * half[1] + p.beta * second;
  } else if (p.alpha != 1.0f) {
    half[0] *= p.alpha;
    half[1] *= p.alpha;
  }
  Low* to = const_cast<Low*>(at<Low>(p.to, row, column));
  if (n == kPack && p.to.column == 1) {
    pack(half[0], half[1], to);
  } else {
    pack(half[0], half[1], own);
    for (int j = 0; j < n; ++j) to[j * p.to.column] = own[j];
  }
}

// Whether whole packs of sums are all that is stored.
AMP_MP_BOTH bool is_plain(const Product& p) {
  return !p.c.data && p.alpha == 1.0f && p.to.column == 1;
}

template <class Low>
AMP_MP_BOTH void round_pack(const Product& p, bool plain, int64_t row, int64_t column, int left,
                            Lane (&half)[2]) {
  if (!plain || left < kPack) return round_any<Low>(p, row, column, left, half);
  pack(half[0], half[1], const_cast<Low*>(at<Low>(p.to, row, 0)) + column);
}

}  // namespace
}  // namespace amp_mp::cpu
