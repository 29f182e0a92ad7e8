#pragma once
// Notes which weights of a tile an update has changed (core/changes.h). Included by loops.cpp and
// apply.h.
#include "cpu/convert.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace amp_mp::cpu {
namespace {

static_assert(kTile == kChangesTile);

// Of a tile: the numbers' coefficients, and the bit of each in its byte.
struct Coefficients {
  alignas(64) int16_t at[kTile];
  alignas(64) uint16_t bit[kTile];
  constexpr Coefficients() : at(), bit() {
    for (int i = 0; i < kTile; ++i) at[i] = coefficient_in_tile(i);
    for (int i = 0; i < kTile; ++i) bit[i] = uint16_t(1 << i % 8);
  }
};
constexpr Coefficients kCoefficients;

// The numbers by which n weights are compared: the memory of weights in low precision, which may be
// the second array of their master, or `made`, with the rounded values of float32 ones.
AMP_MP_BOTH const uint16_t* numbers_of(const Array& weights, Format format, int64_t at,
                                       uint16_t* __restrict made, int n) {
  if (weights.format == Format::float32) {
    const float* x = at_element<float>(weights.data, at);
    if (format == Format::bfloat16) {
      for (int i = 0; i < n; ++i) made[i] = compared(x[i], Format::bfloat16);
    } else {
      for (int i = 0; i < n; ++i) made[i] = compared(x[i], Format::float16);
    }
    return made;
  }
  const bool is_second = width_of(weights.format) == 4;
  return at_element<uint16_t>(is_second ? weights.second : weights.data, at);
}

// Sums side by side, of which the total counts: adding them up at each tile would take as long as
// the tile.
struct PartialSums {
  alignas(64) uint32_t lane[16] = {};
  uint32_t total() const {
    uint32_t sum = 0;
    for (uint32_t each : lane) sum += each;
    return sum;
  }
};

// With kBits sets the bits of numbers that are not those of before, and adds to the sum what these
// add; without it adds all numbers. These are the loops of compare_tile in one.
#if defined(__AVX512BW__)
#define AMP_MP_WHOLE_TILES
template <bool kBits>
AMP_MP_BOTH void compare_whole(uint8_t* bits, const uint16_t* before, const uint16_t* after,
                               int64_t tile, PartialSums& sums) {
  __m512i sum = _mm512_setzero_si512();
  for (int i = 0; i < kTile; i += 32) {
    const __m512i now = _mm512_loadu_si512(after + i);
    const __m512i coefficients = _mm512_load_si512(kCoefficients.at + i);
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(now, coefficients));
    if constexpr (kBits) {
      const __m512i old = _mm512_loadu_si512(before + i);
      uint32_t own;
      memcpy(&own, bits + i / 8, sizeof own);
      own |= _mm512_cmpneq_epi16_mask(old, now);
      memcpy(bits + i / 8, &own, sizeof own);
      sum = _mm512_sub_epi32(sum, _mm512_madd_epi16(old, coefficients));
    }
  }
  const __m512i factor = _mm512_set1_epi32(int(coefficient_of_tile(tile)));
  const __m512i all = _mm512_load_si512(sums.lane);
  _mm512_store_si512(sums.lane, _mm512_add_epi32(all, _mm512_mullo_epi32(sum, factor)));
}
#elif defined(__AVX2__)
#define AMP_MP_WHOLE_TILES
template <bool kBits>
AMP_MP_BOTH void compare_whole(uint8_t* bits, const uint16_t* before, const uint16_t* after,
                               int64_t tile, PartialSums& sums) {
  const auto load = [](const void* x) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(x));
  };
  __m256i sum = _mm256_setzero_si256();
  for (int i = 0; i < kTile; i += 32) {
    [[maybe_unused]] __m256i same[2];
    for (int half = 0; half < 2; ++half) {
      const int at = i + 16 * half;
      const __m256i now = load(after + at), coefficients = load(kCoefficients.at + at);
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(now, coefficients));
      if constexpr (kBits) {
        const __m256i old = load(before + at);
        same[half] = _mm256_cmpeq_epi16(old, now);
        sum = _mm256_sub_epi32(sum, _mm256_madd_epi16(old, coefficients));
      }
    }
    if constexpr (kBits) {
      const __m256i bytes = _mm256_packs_epi16(same[0], same[1]);  // eights in the order 0, 2, 1, 3
      uint32_t own;
      memcpy(&own, bits + i / 8, sizeof own);
      own |= ~uint32_t(_mm256_movemask_epi8(_mm256_permute4x64_epi64(bytes, 0xD8)));
      memcpy(bits + i / 8, &own, sizeof own);
    }
  }
  const __m256i factor = _mm256_set1_epi32(int(coefficient_of_tile(tile)));
  const __m256i all = load(sums.lane);
  _mm256_store_si256(reinterpret_cast<__m256i*>(sums.lane),
                     _mm256_add_epi32(all, _mm256_mullo_epi32(sum, factor)));
}
#endif

template <bool kBits>
AMP_MP_BOTH void compare_tile(uint8_t* bits, const uint16_t* before, const uint16_t* after,
                              int64_t tile, int n, PartialSums& sums) {
#ifdef AMP_MP_WHOLE_TILES
  if (n == kTile) return compare_whole<kBits>(bits, before, after, tile, sums);
#endif
  if constexpr (kBits) {
    alignas(64) uint8_t differ[kTile] = {};
    for (int i = 0; i < n; ++i)
      differ[i] = uint8_t(kCoefficients.bit[i] & (before[i] != after[i] ? 0xFFFFu : 0u));
    for (int i = 0; i < n; i += 8) {
      uint64_t eight;  // each has a bit of its own, so the product's highest byte has all of them
      memcpy(&eight, differ + i, sizeof eight);
      bits[i / 8] |= uint8_t(eight * 0x0101010101010101u >> 56);
    }
  }
  uint32_t sum = 0;
  for (int i = 0; i < n; ++i) sum += uint32_t(int32_t(int16_t(after[i])) * kCoefficients.at[i]);
  if constexpr (kBits)
    for (int i = 0; i < n; ++i) sum -= uint32_t(int32_t(int16_t(before[i])) * kCoefficients.at[i]);
  sums.lane[0] += sum * coefficient_of_tile(tile);
}

AMP_MP_BOTH void add_to(uint64_t* sum, const PartialSums& sums) {
  if (sum)  // other threads add their parts
    __atomic_fetch_add(reinterpret_cast<uint32_t*>(sum), sums.total(), __ATOMIC_RELAXED);
}

// Notes the update of one tile, or of several if only all are added up: `before` and `after` are
// called around it.
class Noting {
 public:
  explicit Noting(const Slot& slot)
      : changes_(slot.changes), weights_(slot.master), sum_(slot.sum) {}

  bool is_wanted() const { return changes_.sum || sum_; }
  bool compares() const { return changes_.sum; }  // then a tile at a time

  AMP_MP_OWN void before(int64_t at, int n) {
    const uint16_t* found = numbers_of(weights_, changes_.format, at, before_, n);
    if (found == before_) return;
    if (n == kTile)  // a constant size needs no call
      memcpy(before_, found, sizeof before_);
    else
      memcpy(before_, found, size_t(n) * sizeof *found);
  }

  AMP_MP_OWN void after(int64_t at, int n) {
    alignas(64) uint16_t made[kTile];
    const uint16_t* now = numbers_of(weights_, changes_.format, at, made, n);
    if (changes_.sum)
      compare_tile<true>(changes_.bits() + at / 8, before_, now, at / kTile, n, added_);
    for (int i = 0; sum_ && i < n; i += kTile)
      compare_tile<false>(nullptr, nullptr, now + i, (at + i) / kTile,
                          n - i < kTile ? n - i : kTile, sums_);
  }

  // Once, when all is updated.
  void add() const {
    add_to(changes_.sum, added_);
    add_to(sum_, sums_);
  }

 private:
  alignas(64) uint16_t before_[kTile];
  const Changes changes_;
  const Array weights_;
  uint64_t* const sum_;
  PartialSums added_, sums_;
};

constexpr int kWord = 64;

// Where the bits of [begin, end) are set, `count` of them.
template <class Index>
AMP_MP_BOTH void find_bits(const uint64_t* words, int64_t begin, int64_t end, Index* to,
                           int64_t count) {
  // Most words have few bits. So many are always written, since a loop that ends after a number of
  // turns that no processor can guess takes longer; what is too much is written over.
  constexpr int kFew = 4;
  int64_t n = 0;
  for (int64_t i = begin; i < end; i += kWord) {
    uint64_t left = words[i / kWord];
    const int64_t next = n + __builtin_popcountll(left);
    if (n + kFew <= count)
      for (int k = 0; k < kFew; ++k, left &= left - 1)
        to[n + k] = Index(i + __builtin_ctzll(left | uint64_t(1) << (kWord - 1)));
    else
      left = words[i / kWord];
    for (int64_t at = next - __builtin_popcountll(left); left != 0; ++at, left &= left - 1)
      to[at] = Index(i + __builtin_ctzll(left));
    n = next;
  }
}

template <class Index>
AMP_MP_BOTH void gather_as(const Gathering& g, int64_t begin, int64_t end, int64_t first,
                           int64_t count) {
  auto* const positions = static_cast<Index*>(g.positions) + first;
  uint16_t* const values = g.values + first;
  find_bits(g.changes.words(), begin, end, positions, count);
  if (g.weights.format == Format::float32) {
    const auto* weights = static_cast<const float*>(g.weights.data);
    for (int64_t k = 0; k < count; ++k)
      values[k] = compared(weights[positions[k]], g.changes.format);
  } else {
    const auto* weights = static_cast<const uint16_t*>(g.weights.data);
    for (int64_t k = 0; k < count; ++k) values[k] = weights[positions[k]];
  }
  const Index start = Index(g.origin.first), length = Index(g.origin.row_length),
              gap = Index(g.origin.row_stride - g.origin.row_length);
  for (int64_t k = 0; k < count; ++k)
    positions[k] += start + (length ? positions[k] / length * gap : 0);
}

}  // namespace
}  // namespace amp_mp::cpu
