#pragma once
// Layer and RMS norms of rows, and their gradients: float32 between one reading and one
// rounding of each element. Included by loops.cpp.
#include "cpu/convert.h"

namespace amp_mp::cpu {
namespace {

// Sums of a row side by side, so that adding is vectors; AVX2 has no registers for twice as many.
constexpr int kSums = 32;

AMP_MP_BOTH float total(float (&sum)[kSums]) {
  for (int half = kSums / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
  return sum[0];
}

// Elements of a row that stay decoded between its passes; longer rows are decoded in each.
constexpr int kKeptRow = 4096;

// Calls f(at, n) for the tiles of a row of `width` elements.
template <class F>
AMP_MP_BOTH void by_row_tiles(int64_t width, const F& f) {
  for (int64_t at = 0; at < width; at += kTile) f(at, int(width - at < kTile ? width - at : kTile));
}

// A row of an array in float32, or `otherwise` where there is none, with zeros behind its end. Rows
// of float32 without an end inside of kSums elements are read where they are.
struct NormRow {
  const Array from;
  const float otherwise;
  const int64_t width;
  const bool in_place = from.data && from.format == Format::float32 && width % kSums == 0;
  int64_t first = 0;
  alignas(64) float kept[kKeptRow];

  AMP_MP_BOTH NormRow(const Array& from, float otherwise, int64_t width)
      : from(from), otherwise(otherwise), width(width) {
    open(0);
  }

  AMP_MP_BOTH void open(int64_t row) {
    first = row * width;
    if (!in_place && width <= kKeptRow)
      by_row_tiles(width, [&](int64_t at, int n) { fill(at, n, kept + at); });
  }
  AMP_MP_BOTH float* tile(int64_t at, int n) {
    if (in_place) return at_element<float>(from.data, first + at);
    if (width <= kKeptRow) return kept + at;
    fill(at, n, kept);
    return kept;
  }
  AMP_MP_BOTH void fill(int64_t at, int n, float* to) const {
    for (int i = n; i < kTile; ++i) to[i] = 0.0f;
    if (from.data) {
      decode_tile(from, first + at, to, n);
    } else {
      for (int i = 0; i < n; ++i) to[i] = otherwise;
    }
  }
};

template <bool Centred>
AMP_MP_OWN void norm_rows(const Norm& norm, int64_t begin, int64_t end) {
  const int64_t width = norm.width;
  NormRow x(norm.x, 0.0f, width), weight(norm.weight, 1.0f, width), bias(norm.bias, 0.0f, width);
  for (int64_t row = begin; row < end; ++row) {
    x.open(row);
    float mean = 0.0f;
    if constexpr (Centred) {
      alignas(64) float sum[kSums] = {};
      by_row_tiles(width, [&](int64_t at, int n) {
        const float* tile = x.tile(at, n);
        for (int i = 0; i < n; i += kSums)
          for (int j = 0; j < kSums; ++j) sum[j] += tile[i + j];
      });
      mean = norm.mean[row] = total(sum) / float(width);
    }
    alignas(64) float squares[kSums] = {};
    by_row_tiles(width, [&](int64_t at, int n) {
      float* tile = x.tile(at, n);
      for (int i = n; i % kSums; ++i) tile[i] = mean;  // adds nothing
      for (int i = 0; i < n; i += kSums)
        for (int j = 0; j < kSums; ++j) squares[j] += (tile[i + j] - mean) * (tile[i + j] - mean);
    });
    const double variance = total(squares) / float(width);
    const float scale = norm.scale[row] = float(1.0 / sqrt(variance + norm.eps));
    by_row_tiles(width, [&](int64_t at, int n) {
      const float *tile = x.tile(at, n), *w = weight.tile(at, n), *b = bias.tile(at, n);
      alignas(64) float y[kTile];
      for (int i = 0; i < n; ++i) {
        const float unit = (tile[i] - mean) * scale * w[i];
        y[i] = Centred ? unit + b[i] : unit;
      }
      encode_tile(y, norm.y, row * width + at, nullptr, n);
    });
  }
}

AMP_MP_BOTH void norm(const Norm& norm, int64_t begin, int64_t end) {
  if (begin >= end) return;
  if (norm.mean) return norm_rows<true>(norm, begin, end);
  norm_rows<false>(norm, begin, end);
}

template <bool Centred>
AMP_MP_OWN void gradients_of_rows(const Norm& norm, int64_t begin, int64_t end, float* weight_sums,
                                  float* bias_sums) {
  const int64_t width = norm.width;
  NormRow x(norm.x, 0.0f, width), dy(norm.dy, 0.0f, width), weight(norm.weight, 1.0f, width);
  for (int64_t row = begin; row < end; ++row) {
    const float mean = Centred ? norm.mean[row] : 0.0f, scale = norm.scale[row];
    alignas(64) float sum[kSums] = {}, product[kSums] = {};
    x.open(row);
    dy.open(row);
    by_row_tiles(width, [&](int64_t at, int n) {
      const float *grad = dy.tile(at, n), *value = x.tile(at, n), *w = weight.tile(at, n);
      alignas(64) float unit[kTile];
      for (int i = 0; i < n; i += kSums)
        for (int j = 0; j < kSums; ++j) unit[i + j] = (value[i + j] - mean) * scale;
      if (weight_sums)
        for (int i = 0; i < n; ++i) weight_sums[at + i] += grad[i] * unit[i];
      if (bias_sums)
        for (int i = 0; i < n; ++i) bias_sums[at + i] += grad[i];
      for (int i = 0; i < n; i += kSums)
        for (int j = 0; j < kSums; ++j) {
          if constexpr (Centred) sum[j] += grad[i + j] * w[i + j];
          product[j] += grad[i + j] * w[i + j] * unit[i + j];
        }
    });
    if (!norm.dx.data) continue;
    const float along = total(product) / float(width) * scale;
    const float constant = Centred ? total(sum) / float(width) : 0.0f;
    by_row_tiles(width, [&](int64_t at, int n) {
      const float *grad = dy.tile(at, n), *value = x.tile(at, n), *w = weight.tile(at, n);
      alignas(64) float dx[kTile];
      for (int i = 0; i < n; ++i)
        dx[i] = scale * (grad[i] * w[i] - constant - (value[i] - mean) * along);
      encode_tile(dx, norm.dx, row * width + at, nullptr, n);
    });
  }
}

// Of rows [begin, end): y's gradient gives x's, and adds to those of weight and bias.
AMP_MP_BOTH void norm_gradients(const Norm& norm, int64_t begin, int64_t end, float* weight_sums,
                                float* bias_sums) {
  if (begin >= end) return;
  if (norm.mean) return gradients_of_rows<true>(norm, begin, end, weight_sums, bias_sums);
  gradients_of_rows<false>(norm, begin, end, weight_sums, bias_sums);
}

}  // namespace
}  // namespace amp_mp::cpu
