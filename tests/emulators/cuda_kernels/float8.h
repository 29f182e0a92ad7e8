#pragma once
// Weights as float8 on both sides: every pass, form and format, parts of blocks, odd addresses.
#include "core/float8.h"
#include "cpu/kernels.h"
#include "measuring.h"

namespace {

// Codes and the numbers of blocks; `scales` has room for float32.
struct Float8Arrays {
  Memory codes, amax, scales;

  Float8Arrays(const Float8& f, size_t skew)
      : codes(size_t(f.matrices * f.rows * f.columns), skew),
        amax(size_t(f.blocks()) * sizeof(float), 0),
        scales(size_t(f.blocks()) * (f.is_power ? 1 : sizeof(float)), 0) {}

  void enlarge() const {
    for (size_t i = 0; i < amax.bytes() / sizeof(float); ++i) {
      float& largest = reinterpret_cast<float*>(amax.at())[i];
      if (largest < 1e30f) largest *= 5;
    }
  }

  Float8 in(Float8 f, Float8Pass pass) const {
    f.pass = pass;
    f.codes = reinterpret_cast<uint8_t*>(codes.at());
    f.amax = reinterpret_cast<float*>(amax.at());
    f.scales = scales.at();
    return f;
  }
};

void float8_both(const Float8& f, size_t skew, size_t where) {
  const Float8Arrays wanted(f, skew), found(f, skew);
  for (const Float8Pass pass :
       {Float8Pass::amax, Float8Pass::scales, Float8Pass::codes, Float8Pass::whole}) {
    if (f.is_mx && pass != Float8Pass::whole) continue;
    cpu::kernels()->float8(wanted.in(f, pass), 0, f.blocks());
    expect(!cuda::float8(found.in(f, pass), nullptr), "float8 is launched", "", where);
    const bool same = wanted.codes.same(found.codes) && wanted.amax.same(found.amax) &&
                      wanted.scales.same(found.scales);
    expect(same, "float8", kFormatNames[int(f.format)], 10 * where + size_t(pass));
    if (pass == Float8Pass::amax) {  // other processes have larger weights in the same blocks
      wanted.enlarge();
      found.enlarge();
    }
  }
}

void float8_both(bool quick) {
  struct Shape {
    int64_t matrices, rows, columns;
    int32_t first_row, first_column;
  };
  const Shape shapes[] = {{1, 128, 128, 0, 0}, {1, 130, 160, 0, 0}, {2, 3, 32, 0, 0},
                          {3, 70, 33, 100, 0}, {1, 20, 200, 0, 72}, {2, 129, 257, 127, 127},
                          {1, 0, 64, 0, 0},    {1, 40, 8192, 0, 0}, {1, 1, 1, 5, 9},
                          {2, 300, 72, 8, 16}, {1, 1, 8224, 0, 0}};
  std::mt19937 random(9);
  size_t where = 0;
  for (const Format format : {F::float32, F::float16, F::bfloat16})
    for (const Shape& s : shapes)
      for (const size_t skew : {size_t(0), size_t(1), size_t(3)})
        for (int kind = 0; kind < (quick ? 2 : 8); ++kind, ++where) {
          Float8 f = {};
          f.format = format;
          f.matrices = s.matrices, f.rows = s.rows, f.columns = s.columns;
          StoredArray weights(size_t(s.matrices * s.rows * s.columns), format, skew, 0);
          if (kind % 2 == 0) {
            weights.fill_with_any_bits(random);
          } else {
            std::vector<float> x = numbers(weights.n, unsigned(where), 0.02f, false);
            for (size_t i = 5; i < weights.n; i += 977) x[i] = i % 2 ? NAN : -HUGE_VALF;
            weights.fill(x, false);
          }
          f.weights = weights.array().data;
          if (s.columns % kFloat8Group == 0) {
            f.is_power = f.is_mx = true;
            float8_both(f, skew, where);
            f.is_mx = false;
          }
          f.first_row = s.first_row, f.first_column = s.first_column;
          for (const bool power : {false, true}) {
            f.is_power = power;
            float8_both(f, skew, where);
          }
        }
}

}  // namespace
