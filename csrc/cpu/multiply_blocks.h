#pragma once
// Products of many rows, as in BLIS (Van Zee and van de Geijn, 2015): a block of a and a block of b
// are converted to float32 once, into memory that the caches hold, and each tile of the result is
// summed in registers. Every sum is added up in the order of the depth, by one multiply-add after
// another, so the bits depend neither on tiles and blocks nor on how threads share the product.
#include "cpu/kernels.h"
#include "cpu/multiply_store.h"
#include "cpu/transpose.h"

namespace amp_mp::cpu {
namespace {

// Rows of a tile: two registers of sums each, which with two of b and one of a fill the registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTall = 12;
#else
constexpr int kTall = 6;
#endif
// A sliver of b, kPack columns, takes 16 KiB, half of the L1 cache; all of them, and the rows of a,
// lie in the L2 cache.
constexpr int kBlockDepth = 4096 / kPack, kBlockColumns = 256, kBlockRows = 49152 / kBlockDepth;
// Numbers from one row or sliver to the next; powers of two would use few sets of the cache.
constexpr int kARow = kBlockDepth + 16, kSliver = kBlockDepth * kPack + 16;
constexpr int kASize = kBlockRows * kARow, kBSize = kBlockColumns / kPack * kSliver;
static_assert(kASize + kBSize + kBlockRows * kBlockColumns <= kWorkspace);

// A block of a, by rows.
template <class Low>
AMP_MP_OWN void convert_a(const Product& p, int64_t row, int rows, int64_t k, int depth,
                          float* to) {
  if (p.a.row == 1 && p.a.column != 1) {
    for (int i = 0; i < depth; i += kLanes) {
      const int n = depth - i < kLanes ? depth - i : kLanes;
      transpose_lines(at<Low>(p.a, row, k + i), p.a.column, n, rows, to + i, kARow);
    }
    return;
  }
  for (int r = 0; r < rows; ++r, to += kARow) {
    const Low* from = at<Low>(p.a, row + r, k);
    if (p.a.column == 1)
      decode_tile(from, to, depth);
    else
      for (int i = 0; i < depth; ++i) to[i] = decode(from[i * p.a.column]);
  }
}

// kPack numbers, or fewer, as a row of a sliver.
template <class Low>
AMP_MP_BOTH void convert_pack(const Low* from, int n, float* to) {
  Low whole[kPack];
  if (n < kPack) {
    for (int i = 0; i < kPack; ++i) whole[i] = i < n ? from[i] : Low{};
    from = whole;
  }
  Lane first, second;
  unpack(from, first, second);
  store_lane(first, to);
  store_lane(second, to + kLanes);
}

// A block of b, by slivers whose columns are in the order of `unpack`.
template <class Low>
AMP_MP_OWN void convert_b(const Product& p, bool dense_columns, int64_t column, int columns,
                          int64_t k, int depth, float* to) {
  if (!dense_columns) {
    for (int i = 0; i < depth; ++i) {
      const Low* from = at<Low>(p.b, k + i, column);
      float* row = to + i * kPack;
      int c = 0;
      for (; c + kPack <= columns; c += kPack, row += kSliver) convert_pack(from + c, kPack, row);
      if (c < columns) convert_pack(from + c, columns - c, row);
    }
    return;
  }
  // Every second column from the first one on and from the second one on, or halves of the columns.
  constexpr bool kPairs = std::is_same_v<Low, bfloat16>;
  constexpr int kStep = kPairs ? 2 : 1;
  for (int c = 0; c < columns; c += kPack, to += kSliver)
    for (int half = 0; half < 2; ++half) {
      const int first = c + half * (kPairs ? 1 : kLanes),
                left = (columns - first + kStep - 1) / kStep;
      if (left <= 0) continue;  // their sums are not stored
      transpose_lines(at<Low>(p.b, k, column + first), kStep * p.b.column,
                      left < kLanes ? left : kLanes, depth, to + half * kLanes, kPack);
    }
}

// A tile of the result, or what a block of the depth adds to it.
struct Tile {
  const float *a, *b;
  int depth;
  float* sums;        // what earlier blocks have added, and where it is kept for later ones
  bool begins, ends;  // the depth
  bool plain;
  int64_t row, column;
  int columns;  // that are left in the product from `column` on
};

template <class Low, int Rows>
AMP_MP_OWN void multiply_tile(const Product& p, const Tile& t) {
  Lane sum[Rows][2];
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < 2; ++c)
      sum[r][c] = t.begins ? Lane{} : load_lane(t.sums + r * kPack + c * kLanes);
  const float *a = t.a, *b = t.b;
  for (const float* end = b + t.depth * kPack; b < end; ++a, b += kPack) {
    const Lane first = load_lane(b), second = load_lane(b + kLanes);
    for (int r = 0; r < Rows; ++r) {
      sum[r][0] += a[r * kARow] * first;
      sum[r][1] += a[r * kARow] * second;
    }
  }
  // Rounded from memory: a loop over `sum` that is not unrolled would keep it there all the time.
  for (int r = 0; r < Rows; ++r)
    for (int c = 0; c < 2; ++c) store_lane(sum[r][c], t.sums + r * kPack + c * kLanes);
  if (!t.ends) return;
  for (int r = 0; r < Rows; ++r) {
    const float* own = t.sums + r * kPack;
    Lane half[2] = {load_lane(own), load_lane(own + kLanes)};
    round_pack<Low>(p, t.plain, t.row + r, t.column, t.columns, half);
  }
}

template <class Low, int Rows = kTall>
AMP_MP_BOTH void multiply_tile(const Product& p, int rows, const Tile& t) {
  if (rows == Rows) return multiply_tile<Low, Rows>(p, t);
  if constexpr (Rows > 1) multiply_tile<Low, Rows - 1>(p, rows, t);
}

// The largest part of `size`, in whole units, if it is divided evenly into parts of at most `most`.
AMP_MP_BOTH int even_part(int64_t size, int most, int unit) {
  const int64_t parts = (size + most - 1) / most, part = (size + parts - 1) / parts;
  return int((part + unit - 1) / unit * unit);
}

template <class Low>
AMP_MP_OWN void multiply_blocks(const Product& product, bool dense_columns, int64_t begin,
                                int64_t end) {
  const Product p = product;  // which what is written cannot change
  const bool plain = is_plain(p);
  float *const a = workspace(), *const b = a + kASize, *const sums = b + kBSize;
  const int most_rows = even_part(p.rows, kBlockRows, kTall),
            most_columns = even_part(end - begin, kBlockColumns, kPack),
            most_depth = even_part(p.depth, kBlockDepth, 1);
  const int64_t down = (p.rows + most_rows - 1) / most_rows,
                across = (end - begin + most_columns - 1) / most_columns;
  // The factor whose blocks would be converted again more often has its turn outside.
  const bool by_columns = (down - 1) * (end - begin) > (across - 1) * p.rows;
  for (int64_t i = 0, old_row = -1, old_column = -1; i < down * across; ++i) {
    const int64_t row = (by_columns ? i % down : i / across) * most_rows,
                  column = begin + (by_columns ? i / down : i % across) * most_columns;
    const int rows = int(p.rows - row < most_rows ? p.rows - row : most_rows),
              columns = int(end - column < most_columns ? end - column : most_columns);
    // Tiles of nearly as many rows each: `larger` of them have one more than `least`.
    const int tiles = (rows + kTall - 1) / kTall, least = rows / tiles, larger = rows % tiles;
    for (int64_t k = 0; k < p.depth; k += most_depth) {
      const int depth = int(p.depth - k < most_depth ? p.depth - k : most_depth);
      // All of the depth is there already where it is one block.
      if (row != old_row || depth < p.depth) convert_a<Low>(p, row, rows, k, depth, a);
      if (column != old_column || depth < p.depth)
        convert_b<Low>(p, dense_columns, column, columns, k, depth, b);
      for (int c = 0; c < columns; c += kPack)
        for (int tile = 0, r = 0, tall; tile < tiles; ++tile, r += tall) {
          tall = least + (tile < larger ? 1 : 0);
          multiply_tile<Low>(
              p, tall,
              {a + r * kARow, b + c / kPack * kSliver, depth, sums + (c * kBlockRows + r * kPack),
               k == 0, k + depth == p.depth, plain, row + r, column + c, columns - c});
        }
    }
    old_row = row;
    old_column = column;
  }
}

}  // namespace
}  // namespace amp_mp::cpu
