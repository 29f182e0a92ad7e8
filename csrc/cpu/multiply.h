#pragma once
// Tiles of a matrix product: weights in low precision are converted in registers, each once for all
// rows of a tile, and the sums are float32. A tile's size never changes the order in which one sum
// is added up, so a row of the result does not depend on the rows beside it.
#include <type_traits>

#include "cpu/random.h"

namespace amp_mp::cpu {
namespace {

// Numbers in a register, and rows of a tile: as many as there are registers for their sums.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kTileRows = 4;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kTileRows = 3;
#elif defined(__SSE2__)
constexpr int kLanes = 4, kTileRows = 2;
#else
constexpr int kLanes = 4, kTileRows = 4;
#endif
constexpr int kPack = 2 * kLanes;  // numbers that are converted together
constexpr int kTileColumns = 4;    // of a tile of dot products
constexpr int kRows = 16;          // of `to` that are computed while the weights are read once
constexpr int kPanel = 256;        // columns of `to` whose sums stay in the L1 cache
constexpr int kDepth = 1024;       // elements of the rows that are kept in float32
constexpr int kStreams = 16;       // rows of the weights that are read side by side

typedef float Lane __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Order __attribute__((vector_size(4 * kLanes)));

AMP_MP_BOTH Lane load_lane(const float* from) {
  Lane x;
  memcpy(&x, from, sizeof x);
  return x;
}

AMP_MP_BOTH void store_lane(const Lane& x, float* to) { memcpy(to, &x, sizeof x); }

// kPack numbers as two registers: of bfloat16 those at even places, which are the low halves of
// words, and those at odd ones; of float16 the first half and the second.
AMP_MP_BOTH void unpack(const bfloat16* from, Lane& first, Lane& second) {
  Words words;
  memcpy(&words, from, sizeof words);
  first = Lane(words << 16);
  second = Lane(words & 0xFFFF0000u);
}

// kLanes numbers; in registers, where an instruction converts as many.
template <int Converted = kHalfLanes>
AMP_MP_BOTH Lane widen_lane(const float16* from) {
  Lane x;
  if constexpr (Converted == kLanes) {
    const Vector own = widen(from);
    memcpy(&x, &own, sizeof x);
  } else {
    alignas(64) float own[kLanes];
    decode_tile(from, own, kLanes);
    x = load_lane(own);
  }
  return x;
}

AMP_MP_BOTH void unpack(const float16* from, Lane& first, Lane& second) {
  first = widen_lane(from);
  second = widen_lane(from + kLanes);
}

// The last kPack numbers of a row of `depth`; those that an earlier pack has are 0. Copying the
// rest of the row alone would be byte by byte, and reading the pack would wait for all the bytes.
template <class Low>
AMP_MP_BOTH void last_pack(const Low* row, int depth, Low (&to)[kPack]) {
  uint16_t kept[2 * kPack];
  for (int i = 0; i < 2 * kPack; ++i) kept[i] = i < kPack ? 0 : 0xFFFF;
  Words words, mask;
  memcpy(&words, row + depth - kPack, sizeof words);
  memcpy(&mask, kept + depth % kPack, sizeof mask);
  words &= mask;
  memcpy(to, &words, sizeof to);
}

template <int N>
struct Constant {
  static constexpr int value = N;
};

// Rounded as `round_bfloat16` does it, in all lanes.
AMP_MP_BOTH Words round_lane(const Lane& x) {
  const Words u = Words(x), even = (u >> 16) & 1u;
  return x != x ? Words{} + 0x7FC00000u : u + 0x7FFFu + even;
}

// Two registers rounded, in the order of `unpack`.
AMP_MP_BOTH void pack(const Lane& first, const Lane& second, bfloat16* to) {
  const Words words = round_lane(first) >> 16 | (round_lane(second) & 0xFFFF0000u);
  memcpy(to, &words, sizeof words);
}

AMP_MP_BOTH void pack(const Lane& first, const Lane& second, float16* to) {
  alignas(64) float x[kPack];
  store_lane(first, x);
  store_lane(second, x + kLanes);
  encode_tile(x, to, kPack);
}

// The lanes that `order` names, a's before b's.
AMP_MP_BOTH Lane choose(const Lane& a, const Lane& b, const Order& order) {
#if defined(__clang__)  // its shuffle takes constants, which these are where this is inlined
  Lane found;
  for (int i = 0; i < kLanes; ++i)
    found[i] = order[i] < kLanes ? a[order[i]] : b[order[i] - kLanes];
  return found;
#else
  return __builtin_shuffle(a, b, order);
#endif
}

// kPack numbers in the order of `unpack`.
template <class Low>
AMP_MP_BOTH void order_pack(const float* from, Lane& first, Lane& second) {
  const Lane a = load_lane(from), b = load_lane(from + kLanes);
  Order even;
  for (int i = 0; i < kLanes; ++i) even[i] = 2 * i;
  first = std::is_same_v<Low, bfloat16> ? choose(a, b, even) : a;
  second = std::is_same_v<Low, bfloat16> ? choose(a, b, even + 1) : b;
}

// Groups of `Group` lanes of a and b are halved: the first halves plus the second ones, a's before
// b's within each `Span` lanes.
template <int Group, int Span>
AMP_MP_BOTH Lane add_halves(const Lane& a, const Lane& b) {
  Order first;
  for (int i = 0; i < kLanes; ++i) {
    const int at = i % Span, own = at % (Span / 2), half = Group / 2;
    first[i] = i - at + own / half * Group + own % half + (at < Span / 2 ? 0 : kLanes);
  }
  return choose(a, b, first) + choose(a, b, first + Group / 2);
}

// The sums of the lanes of each register, added to a row of `sums` for each row of the tile. Within
// 128 bits at first, where shuffles are cheap.
template <int Rows, int Columns>
AMP_MP_BOTH void add_up(const Lane (&x)[Rows][kTileColumns], float* sums) {
  Lane row[4] = {};
  for (int r = 0; r < Rows; ++r) {
    const Lane ab = add_halves<2, 4>(x[r][0], x[r][1]), cd = add_halves<2, 4>(x[r][2], x[r][3]);
    row[r] = add_halves<2, 4>(ab, cd);
  }
  alignas(64) float all[4 * kTileColumns];
  if constexpr (kLanes == 16) {
    const Lane ab = add_halves<16, 16>(row[0], row[1]), cd = add_halves<16, 16>(row[2], row[3]);
    store_lane(add_halves<8, 16>(ab, cd), all);
  } else if constexpr (kLanes == 8) {
    for (int r = 0; r < Rows; r += 2)
      store_lane(add_halves<8, 8>(row[r], row[r + 1]), all + r * kTileColumns);
  } else {
    for (int r = 0; r < Rows; ++r) store_lane(row[r], all + r * kTileColumns);
  }
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < Columns; ++c) sums[r * kPanel + c] += all[r * kTileColumns + c];
}

// sums[r][c] += x[r] . weights[c] over `depth`. x is in the order of `unpack`; its numbers after
// the last whole pack are at the end of one more pack. Before weights + depth there are kPack
// numbers.
template <class Low, int Rows, int Columns>
AMP_MP_BOTH void dots(const float* x, const Low* weights, int64_t row, int depth, float* sums) {
  Lane sum[Rows][kTileColumns] = {};
  const auto add = [&](const Low* from, int64_t row, const float* x)
                       __attribute__((always_inline)) {
                         for (int c = 0; c < Columns; ++c) {
                           Lane first, second;
                           unpack(from + c * row, first, second);
                           for (int r = 0; r < Rows; ++r) {
                             sum[r][c] += load_lane(x + r * kDepth) * first;
                             sum[r][c] += load_lane(x + r * kDepth + kLanes) * second;
                           }
                         }
                       };
  int k = 0;
  for (; k + kPack <= depth; k += kPack) add(weights + k, row, x + k);
  if (k < depth) {
    Low last[Columns][kPack];
    for (int c = 0; c < Columns; ++c) last_pack(weights + c * row, depth, last[c]);
    add(last[0], kPack, x + k);
  }
  add_up<Rows, Columns>(sum, sums);
}

// sums[r][c] += x[r][k] * weights[k][c] over `depth` k, for Packs packs of columns, in their order.
template <class Low, int Rows, int Packs>
AMP_MP_BOTH void outer(const float* x, int64_t x_row, int64_t x_column, const Low* weights,
                       int64_t row, int depth, float* sums) {
  Lane sum[Rows][2 * Packs];
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < 2 * Packs; ++c) sum[r][c] = load_lane(sums + r * kPanel + c * kLanes);
  for (int k = 0; k < depth; ++k) {
    Lane weight[2 * Packs];
    for (int c = 0; c < Packs; ++c)
      unpack(weights + k * row + c * kPack, weight[2 * c], weight[2 * c + 1]);
    for (int r = 0; r < Rows; ++r) {
      const float factor = x[r * x_row + k * x_column];
      for (int c = 0; c < 2 * Packs; ++c) sum[r][c] += factor * weight[c];
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < 2 * Packs; ++c) store_lane(sum[r][c], sums + r * kPanel + c * kLanes);
}

}  // namespace
}  // namespace amp_mp::cpu
