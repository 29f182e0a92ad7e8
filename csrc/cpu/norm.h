#pragma once
// Layer norms and RMS norms of rows, and their gradients: float32 between one reading and one
// rounding of each element. Included by loops.cpp.
#include "cpu/convert.h"

namespace amp_mp::cpu {
namespace {

constexpr int kSums = 64;  // sums of a row side by side, so that adding is vectors

AMP_MP_BOTH float total(float (&sum)[kSums]) {
  for (int half = kSums / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
  return sum[0];
}

// Calls f(at, n) for the tiles of a row of `width` elements.
template <class F>
AMP_MP_BOTH void by_row_tiles(int64_t width, const F& f) {
  for (int64_t at = 0; at < width; at += kTile) f(at, int(width - at < kTile ? width - at : kTile));
}

// A tile of an array, or `otherwise` where there is none. Zeros behind n.
AMP_MP_BOTH void open_norm(const Array& from, int64_t at, float otherwise, float* to, int n) {
  for (int i = n; i < kTile; ++i) to[i] = 0.0f;
  if (from.data) {
    decode_tile(from, at, to, n);
  } else {
    for (int i = 0; i < n; ++i) to[i] = otherwise;
  }
}

AMP_MP_OWN void norm(const Norm& norm, int64_t begin, int64_t end) {
  alignas(64) float x[kTile], weight[kTile], bias[kTile];
  const int64_t width = norm.width;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = row * width;
    // The sum of (x - mean)^power over the row.
    const auto sum_of = [&](float mean, bool squares) {
      alignas(64) float sum[kSums] = {};
      by_row_tiles(width, [&](int64_t at, int n) {
        open_norm(norm.x, first + at, 0.0f, x, n);
        for (int i = 0; i < n; ++i) x[i] -= mean;
        for (int i = 0; i < kTile; i += kSums)
          for (int j = 0; j < kSums; ++j) sum[j] += squares ? x[i + j] * x[i + j] : x[i + j];
      });
      return total(sum) / float(width);
    };
    const float mean = norm.mean ? sum_of(0.0f, false) : 0.0f;
    const float scale = float(1.0 / sqrt(double(sum_of(mean, true)) + norm.eps));
    if (norm.mean) norm.mean[row] = mean;
    if (norm.scale) norm.scale[row] = scale;
    by_row_tiles(width, [&](int64_t at, int n) {
      open_norm(norm.x, first + at, 0.0f, x, n);
      open_norm(norm.weight, at, 1.0f, weight, n);
      open_norm(norm.bias, at, 0.0f, bias, n);
      for (int i = 0; i < kTile; ++i) x[i] = (x[i] - mean) * scale * weight[i] + bias[i];
      encode_tile(x, norm.y, first + at, nullptr, n);
    });
  }
}

// Of rows [begin, end): y's gradient gives x's, and adds to those of weight and bias.
AMP_MP_OWN void norm_gradients(const Norm& norm, int64_t begin, int64_t end, float* weight_sums,
                               float* bias_sums) {
  alignas(64) float x[kTile], dy[kTile], weight[kTile];
  const int64_t width = norm.width;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t first = row * width;
    const float mean = norm.mean ? norm.mean[row] : 0.0f, scale = norm.scale[row];
    alignas(64) float sum[kSums] = {}, product[kSums] = {};
    const auto open = [&](int64_t at, int n) {
      open_norm(norm.x, first + at, 0.0f, x, n);
      open_norm(norm.dy, first + at, 0.0f, dy, n);
      open_norm(norm.weight, at, 1.0f, weight, n);
      for (int i = 0; i < n; ++i) x[i] = (x[i] - mean) * scale;
    };
    by_row_tiles(width, [&](int64_t at, int n) {
      open(at, n);
      if (weight_sums)
        for (int i = 0; i < n; ++i) weight_sums[at + i] += dy[i] * x[i];
      if (bias_sums)
        for (int i = 0; i < n; ++i) bias_sums[at + i] += dy[i];
      for (int i = 0; i < kTile; i += kSums)
        for (int j = 0; j < kSums; ++j) {
          sum[j] += dy[i + j] * weight[i + j];
          product[j] += dy[i + j] * weight[i + j] * x[i + j];
        }
    });
    if (!norm.dx.data) continue;
    const float along = total(product) / float(width);
    const float constant = norm.mean ? total(sum) / float(width) : 0.0f;
    by_row_tiles(width, [&](int64_t at, int n) {
      open(at, n);
      for (int i = 0; i < kTile; ++i) x[i] = scale * (dy[i] * weight[i] - constant - x[i] * along);
      encode_tile(x, norm.dx, first + at, nullptr, n);
    });
  }
}

}  // namespace
}  // namespace amp_mp::cpu
