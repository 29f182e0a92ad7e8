// From which size on a matrix product is faster in native bfloat16. oneDNN needs 10 us before its
// first multiplication: a small product is up to ten times faster in float32, or by the CPU loops.
#include <algorithm>
#include <cmath>

#include "torch/products/products.h"

namespace amp_mp::products {
namespace {

constexpr int kRows = 12, kEven = 12, kRagged = 6;
constexpr int16_t never = 0x7fff;

// The depth K from which bfloat16 is faster, for M = 1, 2, 4, ... rows and N columns. Measured on
// an AMD Zen 5 (AVX512-BF16), torch 2.13, one thread; `benchmarks/products.py --calibrate` measures
// it again. It has the form; `later` is how much deeper products have to be on this processor,
// which a process measures. Ragged N, no multiple of 4, have a table of their own, because float32
// is slower for them.
constexpr int16_t kEvenTable[kRows][kEven] = {
    // N = 1, 2, 4, ..., 2048
    {never, never, never, never, never, never, never, never, never, never, never, never},
    {never, never, never, never, never, never, never, never, 1536, 768, 256, 128},
    {never, never, never, never, never, never, 2048, 2048, 1024, 512, 256, 128},
    {never, never, never, never, never, never, 2048, 1024, 768, 384, 192, 96},
    {never, never, never, never, never, never, 2048, 1024, 512, 192, 128, 64},
    {never, never, never, never, never, never, 2048, 512, 256, 128, 64, 48},
    {never, never, never, never, never, 1536, 1024, 256, 128, 48, 48, 2},
    {never, never, never, never, never, 768, 384, 192, 96, 48, 2, 2},
    {never, never, never, never, never, 384, 192, 96, 32, 2, 2, 2},
    {never, never, never, 256, never, 192, 64, 32, 12, 2, 2, 2},
    {never, never, never, 96, 192, 96, 32, 12, 2, 2, 2, 2},
    {never, never, never, 2, 96, 48, 12, 2, 2, 2, 2, 2},
};
constexpr float kRaggedColumns[kRagged] = {3, 6, 11, 23, 45, 91};
constexpr int16_t kRaggedTable[kRows][kRagged] = {
    {never, never, never, never, never, never},
    {never, never, never, never, never, never},
    {never, never, never, never, never, 2048},
    {never, never, never, never, never, 1024},
    {never, never, never, never, 2048, 1024},
    {never, never, never, 1024, 768, 512},
    {never, never, 1024, 768, 384, 256},
    {never, never, 512, 256, 192, 128},
    {never, 1536, 192, 128, 128, 64},
    {never, 384, 96, 96, 48, 24},
    {never, 96, 4, 32, 24, 12},
    {never, 3, 2, 16, 8, 2},
};
// Smaller products M * N * K are never faster; the check saves most small products the logarithms.
constexpr int64_t kLeastWork = 32768;

// A position between two rows or columns of a table.
struct TablePosition {
  int index;
  float fraction;
};

TablePosition between_powers(int64_t size, int count) {
  const float log = std::log2(float(size));
  const int index = std::min(int(log), count - 2);
  return {index, std::min(log - float(index), 1.0f)};
}

TablePosition between_ragged(int64_t size) {
  int index = 0;
  while (index < kRagged - 2 && float(size) >= kRaggedColumns[index + 1]) ++index;
  const float low = std::log2(kRaggedColumns[index]), high = std::log2(kRaggedColumns[index + 1]);
  return {index, std::clamp((std::log2(float(size)) - low) / (high - low), 0.0f, 1.0f)};
}

// Log2 of the table's K at a position, interpolated linearly in the logarithms of M and N.
template <int Columns>
float threshold(const int16_t (&table)[kRows][Columns], TablePosition row, TablePosition column) {
  const auto log = [&](int r, int c) { return std::log2(float(table[r][c])); };
  const auto along = [&](int r) {
    return (1 - column.fraction) * log(r, column.index) +
           column.fraction * log(r, column.index + 1);
  };
  return (1 - row.fraction) * along(row.index) + row.fraction * along(row.index + 1);
}

}  // namespace

bool is_large(int64_t m, int64_t n, int64_t k, double later) {
  if (m <= 1 || n <= 1 || k <= 0 || double(m * n * k) < kLeastWork * later) return false;
  const TablePosition row = between_powers(m, kRows);
  const bool ragged = n % 4 != 0 && n < kRaggedColumns[kRagged - 1] && n > 4;
  const float from = ragged ? threshold(kRaggedTable, row, between_ragged(n))
                            : threshold(kEvenTable, row, between_powers(n, kEven));
  constexpr float kRounding = 0.15f;  // tolerance of the interpolation
  return std::log2(float(double(k) / later)) + kRounding >= from;
}

}  // namespace amp_mp::products
