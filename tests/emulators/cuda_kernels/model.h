#pragma once
// What compare.cpp updates, copies and measures: lists of tensors in which every format meets every
// other. Buffers have exactly the size they need, so that the address sanitizer sees the first byte
// past them.
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "cpu/passes.h"

namespace {

using namespace amp_mp;
using F = Format;

// Bytes that end where the allocation ends and begin `shift` off an aligned address.
class Memory {
 public:
  Memory(size_t bytes, size_t shift) : bytes_(bytes), shift_(shift) {
    data_.reset(static_cast<char*>(std::malloc(shift + bytes > 0 ? shift + bytes : 1)));
    std::memset(at(), 0xA5, bytes_);
  }
  Memory(const Memory& other) : Memory(other.bytes_, other.shift_) {
    std::memcpy(at(), other.at(), bytes_);
  }

  Memory(Memory&&) = default;
  Memory& operator=(Memory&&) = default;

  char* at() const { return data_.get() + shift_; }
  size_t bytes() const { return bytes_; }
  bool same(const Memory& other) const { return !std::memcmp(at(), other.at(), bytes_); }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  size_t bytes_, shift_;
  std::unique_ptr<char, Free> data_;
};

size_t bytes_of(Format f) { return f == F::float32 ? 4 : f == F::m8 ? 1 : 2; }

size_t rest_bytes_of(Format f) {
  const bool narrow = f == F::bfloat16_split24 || f == F::float16_split24;
  return narrow ? 1 : is_split(f) || f == F::m8 ? 2 : 0;
}

// n numbers in a format; or no array at all.
struct StoredArray {
  bool exists = false;
  size_t n = 0;
  Format format = F::float32;
  Memory data{0, 0}, rest{0, 0};

  StoredArray() = default;
  StoredArray(size_t count, Format f, size_t shift, size_t rest_shift)  // in elements
      : exists(true),
        n(count),
        format(f),
        data(n * bytes_of(f), shift * bytes_of(f)),
        rest((f == F::m8 ? n / kGroup : n) * rest_bytes_of(f), rest_shift * rest_bytes_of(f)) {}

  Array array() const {
    if (!exists) return {nullptr, F::float32};
    return {data.at(), format, rest_bytes_of(format) > 0 ? rest.at() : nullptr};
  }

  bool same(const StoredArray& other) const {
    return data.same(other.data) && rest.same(other.rest);
  }

  void fill(const std::vector<float>& x, bool clamp) {
    if (!exists) return;
    const Array from = {const_cast<float*>(x.data()), F::float32};
    const Transfer t = {int64_t(n), array(), from, clamp, random_stream(5, 1, 7, false)};
    cpu::copy(&t, 1, 1.0, 1);
  }

  void fill_with_any_bits(std::mt19937& random) {
    for (const Memory* m : {&data, &rest})
      for (size_t i = 0; i < m->bytes(); ++i) m->at()[i] = char(random());
  }
};

// Normally distributed numbers, or their magnitudes.
std::vector<float> numbers(size_t n, size_t seed, float spread, bool positive = false) {
  static const std::vector<float> pool = [] {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> x(10007);
    for (float& y : x) y = normal(random);
    return x;
  }();
  std::vector<float> x(n);
  for (size_t i = 0; i < n; ++i) {
    x[i] = spread * pool[(i + 37 * seed) % pool.size()];
    if (positive) x[i] = std::fabs(x[i]);
  }
  return x;
}

size_t to_groups(size_t n) { return (n + kGroup - 1) / kGroup * kGroup; }

// The cycles of the formats have lengths without a common factor, so that after 330 tensors each
// has met all others, and a few tensors already have a bit of everything.
struct Kept {
  Format master;
  bool has_weight;
  Format weight;  // beside the master
};
constexpr Kept kKept[11] = {
    {F::float32, true, F::bfloat16},
    {F::bfloat16_split24, false, {}},
    {F::bfloat16_stochastic, false, {}},
    {F::float32, true, F::float16},
    {F::float16_split24, false, {}},
    {F::float16, false, {}},
    {F::bfloat16_split32, false, {}},
    {F::float16_stochastic, false, {}},
    {F::float32, false, {}},
    {F::float16_split32, false, {}},
    {F::bfloat16, true, F::float16},
};
constexpr Format kMoments[5] = {F::m8, F::float32, F::bfloat16_stochastic, F::float16, F::bfloat16};
constexpr Format kFirstSquares[5] = {F::ue8m8, F::float32, F::bfloat16_stochastic, F::float16,
                                     F::float16_root};
constexpr Format kSquares[6] = {F::ue8m8, F::float32, F::float16_root, F::bfloat16_stochastic,
                                F::ue8m8, F::bfloat16};
constexpr int kAllPairs = 330;

struct Shape {
  std::vector<size_t> sizes;
  int per_group;
  size_t offset = 0;  // in the cycles
};

enum Role { kGrad, kWeight, kMaster, kState0, kState1, kState2, kRoles };

struct Tensor {
  std::array<StoredArray, kRoles> arrays;
  Clock clock;

  bool same(const Tensor& other) const {
    for (int r = 0; r < kRoles; ++r)
      if (!arrays[r].same(other.arrays[r])) return false;
    return !std::memcmp(&clock, &other.clock, sizeof clock);
  }
};

Tensor make_tensor(size_t n, size_t t, bool bad, int states, int squares) {
  // Most tensors are aligned, some in all but one array, few in none.
  const auto shift = [&](size_t which) {
    return t % 16 == 2 || (t % 4 == 1 && t / 4 % 8 == which) ? 1 + t % 7 : 0;
  };
  const Kept& kept = kKept[t % 11];
  Format first = squares == 0 ? kFirstSquares[t % 5] : kMoments[t % 5];
  if (first == F::m8 && n % kGroup != 0) first = F::bfloat16_stochastic;
  constexpr Format kGrads[] = {F::bfloat16, F::float32, F::float16};
  Tensor x;
  x.arrays[kGrad] = StoredArray(n, kGrads[(t + t / 11) % 3], shift(0), 0);
  if (kept.has_weight) x.arrays[kWeight] = StoredArray(n, kept.weight, shift(1), 0);
  x.arrays[kMaster] = StoredArray(n, kept.master, shift(2), shift(3));
  if (states > 0) x.arrays[kState0] = StoredArray(n, first, shift(4), shift(5));
  if (states > 1) x.arrays[kState1] = StoredArray(n, kSquares[t % 6], shift(6), 0);
  if (states > 2) x.arrays[kState2] = StoredArray(n, F::float32, shift(7), 0);

  // Some so small that squares need care, some weights beyond float16, where it saturates.
  const bool still = t % 19 == 5;
  const float w_spread = still || t % 13 == 2 ? 1e-20f : t % 9 == 7 ? 1e5f : 1.0f;
  std::vector<float> g = numbers(n, 5 * t, still ? 1e-20f : 8.0f),
                     w = numbers(n, 5 * t + 1, w_spread);
  if (n > 0 && t % 17 == 6) w[n - 1] = std::nanf("");
  if (n > 0 && t % 17 == 9) w[n / 2] = 1e30f;  // whose square overflows
  if (bad && n > 1) {
    g[n - 1] = w[n / 2] = HUGE_VALF;
    g[0] = w[0] = std::nanf("");
  }
  x.arrays[kGrad].fill(g, false);
  x.arrays[kWeight].fill(w, true);
  x.arrays[kMaster].fill(w, true);
  x.arrays[kState0].fill(numbers(n, 5 * t + 2, still ? 1e-20f : 1e-2f, squares == 0), true);
  x.arrays[kState1].fill(numbers(n, 5 * t + 3, 1e-2f, true), true);
  x.arrays[kState2].fill(numbers(n, 5 * t + 4, 1e-2f, true), true);
  x.clock = t % 6 == 5 ? Clock{0, 1, 1, 0} : Clock{2, 0.81, 0.998, 3.5};
  return x;
}

struct Model {
  std::vector<Tensor> tensors;
  int per_group;

  Model(const Shape& shape, bool bad, int states, int squares) : per_group(shape.per_group) {
    for (size_t t = 0; t < shape.sizes.size(); ++t)
      tensors.push_back(make_tensor(shape.sizes[t], t + shape.offset, bad, states, squares));
  }

  int64_t count() const { return int64_t(tensors.size()); }

  // Rows of statistics have gaps, as for parameters without a gradient.
  static int64_t row(size_t t) { return int64_t(t + (t + 2) / 3); }

  std::vector<Slot> slots() {
    std::vector<Slot> list;
    for (size_t t = 0; t < tensors.size(); ++t) {
      auto& a = tensors[t].arrays;
      Slot s = {};
      s.size = int64_t(a[kGrad].n);
      s.grad = a[kGrad].array();
      s.weight = a[kWeight].array();
      s.master = a[kMaster].array();
      for (int k = 0; k < kMaxStates; ++k) s.state[k] = a[kState0 + k].array();
      s.clock = &tensors[t].clock;
      s.group = int32_t(t / size_t(per_group));
      s.tensor_index = uint32_t(t * 0x9E3779B9u);
      s.first = t % 5 < 3    ? 0
                : t % 5 == 3 ? int64_t(1000003 + t)
                             : (int64_t(1) << 37) - 300 - int64_t(t);
      s.row = row(t);
      list.push_back(s);
    }
    return list;
  }

  std::vector<Reading> readings(Role role) const {
    std::vector<Reading> list(tensors.empty() ? 0 : row(tensors.size() - 1) + 1);
    for (size_t t = 0; t < tensors.size(); ++t) {
      const StoredArray& a = tensors[t].arrays[role];
      list[row(t)] = {int64_t(a.n), a.array()};
    }
    return list;
  }

  std::vector<Hyper> hypers() const {
    std::vector<Hyper> list;
    for (int64_t g = 0; g <= count() / per_group; ++g)
      list.push_back({1e-3 * double(g + 1), 0.9, 0.999, g % 7 == 3 ? 0 : 1e-8,
                      g % 3 == 2 ? 0 : 0.01, 0.9, 0.1, 0.01, 1e-3,
                      uint64_t(g + 1) * 0x123456789ABCDEFu, g % 3 == 1, g % 2 == 1, g % 4 < 2,
                      g % 5 == 2});
    return list;
  }
};

}  // namespace
