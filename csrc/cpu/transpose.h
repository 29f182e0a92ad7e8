#pragma once
// Matrices in low precision as their transposes in float32, and back.
#include "cpu/multiply.h"

namespace amp_mp::cpu {
namespace {

// A square of registers as its transpose: of each two groups of Half lanes in two registers Half
// apart, the second of the one and the first of the other change places; then of smaller groups.
template <int Half = kLanes / 2>
AMP_MP_BOTH void transpose(Lane (&x)[kLanes]) {
  Order first = {};
  for (int i = 0; i < kLanes; ++i) first[i] = i & Half ? i - Half + kLanes : i;
  for (int i = 0; i < kLanes; ++i) {
    if (i & Half) continue;
    const Lane above = x[i], below = x[i + Half];
    x[i] = choose(above, below, first);
    x[i + Half] = choose(above, below, first + Half);
  }
  if constexpr (Half > 1) transpose<Half / 2>(x);
}

// Numbers of a line that are transposed together: bfloat16 in pairs, which are words.
template <class Low>
constexpr int kTogether = std::is_same_v<Low, bfloat16> ? kPack : kLanes;

// kTogether numbers of each of kLanes lines: number j of all of them goes to row j of `to`.
AMP_MP_BOTH void transpose_lines(const bfloat16* const (&lines)[kLanes], int from, float* to,
                                 int to_row) {
  Lane x[kLanes];
  for (int i = 0; i < kLanes; ++i) memcpy(&x[i], lines[i] + from, sizeof x[i]);
  transpose(x);
  for (int i = 0; i < kLanes; ++i) {
    store_lane(Lane(Words(x[i]) << 16), to + 2 * i * to_row);
    store_lane(Lane(Words(x[i]) & 0xFFFF0000u), to + (2 * i + 1) * to_row);
  }
}

AMP_MP_BOTH void transpose_lines(const float16* const (&lines)[kLanes], int from, float* to,
                                 int to_row) {
  Lane x[kLanes];
  for (int i = 0; i < kLanes; ++i) x[i] = widen_lane(lines[i] + from);
  transpose(x);
  for (int i = 0; i < kLanes; ++i) store_lane(x[i], to + i * to_row);
}

// `length` numbers of each of n <= kLanes lines; lanes beyond n repeat the last line.
template <class Low>
AMP_MP_OWN void transpose_lines(const Low* from, int64_t line, int n, int length, float* to,
                                int to_row) {
  constexpr int kStep = kTogether<Low>;
  const Low* lines[kLanes];
  for (int i = 0; i < kLanes; ++i) lines[i] = from + (i < n ? i : n - 1) * line;
  int j = 0;
  for (; j + kStep <= length; j += kStep) transpose_lines(lines, j, to + j * to_row, to_row);
  if (j == length) return;
  Low rest[kLanes][kStep] = {};
  alignas(64) float rows[kStep * kLanes];
  for (int i = 0; i < kLanes; ++i) {
    memcpy(rest[i], lines[i] + j, size_t(length - j) * sizeof(Low));
    lines[i] = rest[i];
  }
  transpose_lines(lines, 0, rows, kLanes);
  for (int i = 0; j + i < length; ++i)
    store_lane(load_lane(rows + i * kLanes), to + (j + i) * to_row);
}

// Positions of all lines at a time: their part of `wide` stays in the L1 cache.
constexpr int kPositions = 64;

template <class Low>
AMP_MP_OWN void widen_transposed_as(const Transposed& t) {
  const auto* low = static_cast<const Low*>(t.low);
  for (int64_t j = 0; j < t.length; j += kPositions) {
    const int n = int(t.length - j < kPositions ? t.length - j : kPositions);
    float* to = t.wide + j * t.lines_beside;
    int64_t i = 0;
    for (; i + kLanes <= t.lines; i += kLanes)
      transpose_lines(low + i * t.line + j, t.line, kLanes, n, to + i, int(t.lines_beside));
    for (; i < t.lines; ++i)
      for (int k = 0; k < n; ++k) to[k * t.lines_beside + i] = decode(low[i * t.line + j + k]);
  }
}

// Row number i of the first register or the second, as `pack` wants them.
template <class Low>
constexpr int packed_row(int i, int half) {
  return std::is_same_v<Low, bfloat16> ? 2 * i + half : i + half * kLanes;
}

// `length` <= kPositions numbers, `row` apart.
template <class Low>
AMP_MP_OWN void round_line(const float* from, int64_t row, int length, Low* to) {
  float own[kPositions];
  for (int k = 0; k < length; ++k) own[k] = from[k * row];
  encode_tile(own, to, length);
}

// `length` rows of kLanes numbers become as many numbers of each of kLanes lines.
template <class Low>
AMP_MP_OWN void round_lines(const float* from, int64_t row, int length, Low* to, int64_t line) {
  int j = 0;
  for (; j + kPack <= length; j += kPack) {
    Lane half[2][kLanes];
    for (int h = 0; h < 2; ++h) {
      for (int i = 0; i < kLanes; ++i)
        half[h][i] = load_lane(from + (j + packed_row<Low>(i, h)) * row);
      transpose(half[h]);
    }
    for (int i = 0; i < kLanes; ++i) pack(half[0][i], half[1][i], to + i * line + j);
  }
  if (j == length) return;
  for (int i = 0; i < kLanes; ++i)
    round_line(from + j * row + i, row, length - j, to + i * line + j);
}

template <class Low>
AMP_MP_OWN void round_transposed_as(const Transposed& t) {
  auto* low = static_cast<Low*>(t.low);
  for (int64_t j = 0; j < t.length; j += kPositions) {
    const int n = int(t.length - j < kPositions ? t.length - j : kPositions);
    const float* from = t.wide + j * t.lines_beside;
    int64_t i = 0;
    for (; i + kLanes <= t.lines; i += kLanes)
      round_lines(from + i, t.lines_beside, n, low + i * t.line + j, t.line);
    for (; i < t.lines; ++i) round_line(from + i, t.lines_beside, n, low + i * t.line + j);
  }
}

}  // namespace
}  // namespace amp_mp::cpu
