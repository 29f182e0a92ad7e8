// Matrix products in low precision, compiled once for each instruction set as loops.cpp, but with
// fused multiply-adds: no other device has to give the same bits.
#include "cpu/multiply_blocks.h"

namespace amp_mp::cpu::AMP_MP_ISA {
namespace {

// Calls f with the first row of each tile, and with the number of its rows as a constant.
template <class F>
AMP_MP_BOTH void by_tiles(int rows, const F& f) {
  int r = 0;
  for (; r + kTileRows <= rows; r += kTileRows) f(r, Constant<kTileRows>{});
  if constexpr (kTileRows > 3)
    if (rows - r == 3) return f(r, Constant<3>{});
  if constexpr (kTileRows > 2)
    if (rows - r == 2) return f(r, Constant<2>{});
  if (rows - r == 1) f(r, Constant<1>{});
}

// A part of `to`: at most kRows rows from `row` on, and at most kPanel columns from `column` on.
template <class Low>
struct Part {
  const Product& p;
  const int64_t row, column;
  const int rows, columns;
  alignas(64) float x[kRows * kDepth], sums[kRows * kPanel];

  AMP_MP_BOTH Part(const Product& p, int64_t row, int64_t column, int64_t end)
      : p(p),
        row(row),
        column(column),
        rows(int(p.rows - row < kRows ? p.rows - row : kRows)),
        columns(int(end - column < kPanel ? end - column : kPanel)) {}

  // Adds the products of a's columns from k on where b's columns are dense.
  AMP_MP_BOTH void add_dots(int64_t k, int depth) {
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < depth; i += kPack) {
        const Low* from = at<Low>(p.a, row + r, k + i);
        Low own[kPack];
        const int none = depth - i < kPack ? kPack - (depth - i) : 0;  // `dots` wants them first
        if (none > 0 || p.a.column != 1) {
          for (int j = 0; j < kPack; ++j) own[j] = j < none ? Low{} : from[(j - none) * p.a.column];
          from = own;
        }
        Lane first, second;
        unpack(from, first, second);
        store_lane(first, x + r * kDepth + i);
        store_lane(second, x + r * kDepth + i + kLanes);
      }
    const auto add = [&](int c, auto count) __attribute__((always_inline)) {
      by_tiles(rows, [&](int r, auto n) __attribute__((always_inline)) {
        dots<Low, n.value, count.value>(x + r * kDepth, at<Low>(p.b, k, column + c), p.b.column,
                                        depth, sums + r * kPanel + c);
      });
    };
    int c = 0;
    for (; c + kTileColumns <= columns; c += kTileColumns) add(c, Constant<kTileColumns>{});
    for (; c < columns; ++c) add(c, Constant<1>{});
  }

  // The same where b's rows are dense; the sums are in the order of `unpack`.
  AMP_MP_BOTH void add_outer(int64_t k, int depth) {
    // x keeps a's order, so that it is converted in a row.
    const bool by_columns = p.a.row == 1 && p.a.column != 1;
    const int64_t x_row = by_columns ? 1 : kDepth, x_column = by_columns ? kRows : 1;
    const int64_t step = by_columns ? 1 : p.a.column;
    const int n = by_columns ? rows : depth;
    for (int i = 0; i < (by_columns ? depth : rows); ++i) {
      const Low* from = by_columns ? at<Low>(p.a, row, k + i) : at<Low>(p.a, row + i, k);
      float* to = x + i * (by_columns ? kRows : kDepth);
      if (step == 1) {
        decode_tile(from, to, n);
      } else {
        for (int j = 0; j < n; ++j) to[j] = decode(from[j * step]);
      }
    }
    const int64_t weights_row = p.b.row;
    for (int d = 0; d < depth; d += kStreams) {
      const int some = depth - d < kStreams ? depth - d : kStreams;
      const Low* from = at<Low>(p.b, k + d, column);
      int c = 0;
      const auto add = [&](const Low* from, int64_t step,
                           auto packs) __attribute__((always_inline)) {
        by_tiles(rows, [&](int r, auto n) __attribute__((always_inline)) {
          outer<Low, n.value, packs.value>(x + r * x_row + d * x_column, x_row, x_column, from,
                                           step, some, sums + r * kPanel + c);
        });
      };
      for (; c + 2 * kPack <= columns; c += 2 * kPack) add(from + c, weights_row, Constant<2>{});
      for (; c + kPack <= columns; c += kPack) add(from + c, weights_row, Constant<1>{});
      if (c == columns) continue;
      Low last[kStreams * kPack] = {};
      for (int i = 0; i < some; ++i)
        memcpy(last + i * kPack, from + i * weights_row + c, size_t(columns - c) * sizeof(Low));
      add(last, kPack, Constant<1>{});
    }
  }

  // Rounds the sums into `to`, a pack at a time.
  AMP_MP_BOTH void round(bool in_packs) const {
    const bool plain = is_plain(p);
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < columns; i += kPack) {
        const float* sum = sums + r * kPanel + i;
        Lane half[2] = {load_lane(sum), load_lane(sum + kLanes)};
        if (!in_packs) order_pack<Low>(sum, half[0], half[1]);
        round_pack<Low>(p, plain, row + r, column + i, columns - i, half);
      }
  }
};

// Depth up to which sums stay in registers: with more, AVX2 reads the numbers of b too often.
constexpr int kShallowest = kLanes == 16 ? kStreams : 4;

// At most kShallowest rows of b, such as in the gradient of a weight by few rows: their float32
// numbers stay in the cache, and sums in registers.
template <class Low>
AMP_MP_OWN void multiply_shallow(const Product& product, int64_t begin, int64_t end) {
  const Product p = product;  // which what is written cannot change
  alignas(64) float b[kShallowest * kPanel];
  const int depth = int(p.depth);
  const bool plain = is_plain(p);
  for (int64_t column = begin; column < end; column += kPanel) {
    const int columns = int(end - column < kPanel ? end - column : kPanel);
    for (int k = 0; k < depth; ++k)
      for (int i = 0; i < columns; i += kPack) {
        Low own[kPack] = {};
        const int n = columns - i < kPack ? columns - i : kPack;
        memcpy(own, at<Low>(p.b, k, column + i), size_t(n) * sizeof(Low));
        Lane first, second;
        unpack(own, first, second);
        store_lane(first, b + k * kPanel + i);
        store_lane(second, b + k * kPanel + i + kLanes);
      }
    for (int64_t row = 0; row < p.rows; row += kTileRows) {
      const int rows = int(p.rows - row < kTileRows ? p.rows - row : kTileRows);
      float a[kTileRows][kShallowest];
      for (int r = 0; r < kTileRows; ++r)
        for (int k = 0; k < depth; ++k)
          a[r][k] = r < rows ? decode(*at<Low>(p.a, row + r, k)) : 0.0f;
      for (int i = 0; i < columns; i += kPack) {
        Lane sum[kTileRows][2];  // `= {}` would be slow instructions for strings
        for (int r = 0; r < kTileRows; ++r) sum[r][0] = sum[r][1] = Lane{};
        for (int k = 0; k < depth; ++k) {
          const Lane first = load_lane(b + k * kPanel + i),
                     second = load_lane(b + k * kPanel + i + kLanes);
          for (int r = 0; r < kTileRows; ++r) {
            sum[r][0] += a[r][k] * first;
            sum[r][1] += a[r][k] * second;
          }
        }
        for (int r = 0; r < rows; ++r)
          round_pack<Low>(p, plain, row + r, column + i, columns - i, sum[r]);
      }
    }
  }
}

// Rows of `outer` products; with more, converting b once is faster.
constexpr int kFewest = 4;

template <class Low>
AMP_MP_OWN void multiply_as(const Product& p, int64_t begin, int64_t end) {
  const bool dense_columns = p.b.row == 1 && (p.b.column != 1 || p.columns == 1);
  if (!dense_columns && p.depth <= kShallowest) return multiply_shallow<Low>(p, begin, end);
  // Rows shorter than two packs cost a dot product more than its sum.
  if (dense_columns ? p.rows > kRows || p.depth < 2 * kPack : p.rows > kFewest)
    return multiply_blocks<Low>(p, dense_columns, begin, end);
  for (int64_t column = begin; column < end; column += kPanel) {
    for (int64_t row = 0; row < p.rows; row += kRows) {
      Part<Low> part(p, row, column, end);
      const int packs = (part.columns + kPack - 1) / kPack;
      for (int r = 0; r < part.rows; ++r)
        memset(part.sums + r * kPanel, 0, sizeof(float) * size_t(packs * kPack));
      for (int64_t k = 0; k < p.depth; k += kDepth) {
        const int depth = int(p.depth - k < kDepth ? p.depth - k : kDepth);
        if (dense_columns)
          part.add_dots(k, depth);
        else
          part.add_outer(k, depth);
      }
      part.round(!dense_columns);
    }
  }
}

}  // namespace

void multiply(const Product& p, int64_t begin, int64_t end) {
  if (p.format == Format::bfloat16) return multiply_as<bfloat16>(p, begin, end);
  multiply_as<float16>(p, begin, end);
}

void widen_transposed(const Transposed& t) {
  if (t.format == Format::bfloat16) return widen_transposed_as<bfloat16>(t);
  widen_transposed_as<float16>(t);
}

void round_transposed(const Transposed& t) {
  if (t.format == Format::bfloat16) return round_transposed_as<bfloat16>(t);
  round_transposed_as<float16>(t);
}

}  // namespace amp_mp::cpu::AMP_MP_ISA
