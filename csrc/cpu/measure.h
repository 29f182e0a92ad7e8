#pragma once
// The measure loop: sums squares in the order of core/reduce.h, 64 elements at a time. Included by
// loops.cpp.
// Note: One order of sums (docs/design.md)
#include "cpu/convert.h"

namespace amp_mp::cpu {
namespace {

// A single stream of reads reaches 0.90 of the memory's speed with hints this far ahead, 0.75
// without.
constexpr int kPrefetchBytes = 8192;

template <class T>
AMP_MP_BOTH void prefetch_row(const T* row) {
  // An integer, because the address may lie past the end of the array.
  const uintptr_t ahead = reinterpret_cast<uintptr_t>(row) + kPrefetchBytes;
  for (unsigned i = 0; i < kLanes * sizeof(T); i += 64)
    __builtin_prefetch(reinterpret_cast<const void*>(ahead + i));
}

AMP_MP_BOTH uint32_t word_at(const void* row, int j) {
  uint32_t word;
  memcpy(&word, static_cast<const char*>(row) + 4 * j, sizeof word);
  return word;
}

// Largest |x| of 16-bit floats that are read as 32-bit words, two at a time: `even` holds the low
// halves shifted to the top, `odd` the high halves. The low bits below a high half are not removed,
// since they cannot change which high half is the largest.
struct PairMaxima {
  uint32_t even[kLanes / 2] = {}, odd[kLanes / 2] = {};

  AMP_MP_BOTH void add(int j, uint32_t word) {
    const uint32_t low = word << 17, high = word & kMagnitude;
    even[j] = even[j] > low ? even[j] : low;
    odd[j] = odd[j] > high ? odd[j] : high;
  }
  AMP_MP_BOTH uint16_t largest() const {
    uint32_t most = 0;
    for (int j = 0; j < kLanes / 2; ++j) {
      const uint32_t low = even[j] >> 17, high = odd[j] >> 16;
      most = most > low ? most : low;
      most = most > high ? most : high;
    }
    return uint16_t(most);
  }
};

// Adds the squares of whole rows of 64 elements to the lanes. Returns the largest |x|, where
// infinity is larger than any number and NaN larger than infinity.
AMP_MP_BOTH float add_rows(const float* __restrict x, int rows, float (&lane)[kLanes]) {
  uint32_t most[kLanes] = {};
  float sum[kLanes] = {};
  for (int r = 0; r < rows; ++r) {
    const float* row = x + r * kLanes;
    prefetch_row(row);
    for (int j = 0; j < kLanes; ++j) {
      const uint32_t magnitude = to_bits(row[j]) & kMagnitude;
      sum[j] += row[j] * row[j];
      most[j] = most[j] > magnitude ? most[j] : magnitude;
    }
  }
  uint32_t all = 0;
  for (int j = 0; j < kLanes; ++j) {
    lane[j] += sum[j];
    all = all > most[j] ? all : most[j];
  }
  return from_bits(all);
}

AMP_MP_BOTH float add_rows(const bfloat16* __restrict x, int rows, float (&lane)[kLanes]) {
  float even[kLanes / 2] = {}, odd[kLanes / 2] = {};
  PairMaxima maxima;
  for (int r = 0; r < rows; ++r) {
    const bfloat16* row = x + r * kLanes;
    prefetch_row(row);
    for (int j = 0; j < kLanes / 2; ++j) {
      const uint32_t word = word_at(row, j);
      const float a = from_bits(word << 16), b = from_bits(word & 0xFFFF0000u);
      even[j] += a * a;
      odd[j] += b * b;
      maxima.add(j, word);
    }
  }
  for (int j = 0; j < kLanes / 2; ++j) {
    lane[2 * j] += even[j];
    lane[2 * j + 1] += odd[j];
  }
  return decode(bfloat16{maxima.largest()});
}

AMP_MP_BOTH float add_rows(const float16* __restrict x, int rows, float (&lane)[kLanes]) {
  float sum[kLanes] = {};
  PairMaxima maxima;
  for (int r = 0; r < rows; ++r) {
    const float16* row = x + r * kLanes;
    prefetch_row(row);
    alignas(64) float y[kLanes];
    decode_tile(row, y, kLanes);
    for (int j = 0; j < kLanes; ++j) sum[j] += y[j] * y[j];
    for (int j = 0; j < kLanes / 2; ++j) maxima.add(j, word_at(row, j));
  }
  for (int j = 0; j < kLanes; ++j) lane[j] += sum[j];
  return decode(float16{maxima.largest()});
}

// Sums the squares of finite elements in double.
template <class T>
AMP_MP_OWN Statistics measure_carefully(const T* x, int n) {
  double lane[kLanes] = {};
  Statistics s = {};
  for (int i = 0; i < n; ++i) {
    const float y = decode(x[i]);
    if (is_finite(y)) {
      const double magnitude = y < 0 ? -double(y) : double(y);
      lane[i % kLanes] += magnitude * magnitude;
      s.max_abs = magnitude > s.max_abs ? magnitude : s.max_abs;
    } else {
      s.non_finite += 1;
    }
  }
  s.sum_squares = add_halving(lane);
  return s;
}

template <class T>
AMP_MP_OWN Statistics measure_block(const T* x, int n) {
  alignas(64) float lane[kLanes] = {};
  const int rows = n / kLanes, rest = n % kLanes;
  float most = add_rows(x, rows, lane);
  if (rest) {  // a row padded with zeros adds nothing
    T row[kLanes] = {};
    memcpy(row, x + rows * kLanes, rest * sizeof(T));
    const float last = add_rows(row, 1, lane);
    most = (to_bits(last) & kMagnitude) > (to_bits(most) & kMagnitude) ? last : most;
  }
  alignas(64) double wide[kLanes];
  for (int j = 0; j < kLanes; ++j) wide[j] = lane[j];
  const Statistics s = {add_halving(wide), most, 0};
  return needs_care(s.sum_squares, most, !is_finite(most)) ? measure_carefully(x, n) : s;
}

}  // namespace
}  // namespace amp_mp::cpu
