#pragma once
// Arrays of every format. Buffers have exactly the size they need, so that the address sanitizer
// sees the first byte past them.
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

// Bytes that end where the allocation ends and begin `skew` off an aligned address.
class Memory {
 public:
  Memory(size_t bytes, size_t skew) : bytes_(bytes), skew_(skew) {
    data_.reset(static_cast<char*>(std::malloc(skew + bytes > 0 ? skew + bytes : 1)));
    std::memset(at(), 0xA5, bytes_);
  }
  Memory(const Memory& other) : Memory(other.bytes_, other.skew_) {
    std::memcpy(at(), other.at(), bytes_);
  }

  Memory(Memory&&) = default;
  Memory& operator=(Memory&&) = default;

  char* at() const { return data_.get() + skew_; }
  size_t bytes() const { return bytes_; }
  bool same(const Memory& other) const { return !std::memcmp(at(), other.at(), bytes_); }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  size_t bytes_, skew_;
  std::unique_ptr<char, Free> data_;
};

size_t bytes_of(Format f) { return size_t(kFormats[int(f)].width); }
size_t second_bytes_of(Format f) { return size_t(kFormats[int(f)].second_width); }
bool is_grouped(Format f) { return kFormats[int(f)].is(kGrouped); }
// How many elements share one of the second array: an array has whole groups.
size_t group_of(Format f) { return size_t(kFormats[int(f)].group); }

// n numbers in a format; or no array at all.
struct StoredArray {
  bool exists = false;
  size_t n = 0;
  Format format = F::float32;
  Memory data{0, 0}, second{0, 0};

  StoredArray() = default;
  StoredArray(size_t count, Format f, size_t skew, size_t second_skew)  // in elements
      : exists(true),
        n(count),
        format(f),
        data(n * bytes_of(f), skew * bytes_of(f)),
        second(n / group_of(f) * second_bytes_of(f), second_skew * second_bytes_of(f)) {}

  Array array() const {
    if (!exists) return {nullptr, F::float32};
    return {data.at(), format, second_bytes_of(format) > 0 ? second.at() : nullptr};
  }

  // Bit for bit, but for the sign of a NaN in float32: the compiler chooses which operand's a sum
  // or product of two NaNs has.
  bool same(const StoredArray& other) const {
    return (data.same(other.data) && second.same(other.second)) || same_but_for_nans(other);
  }

  bool same_but_for_nans(const StoredArray& other) const {
    if (!exists || n != other.n || width_of(format) != 4) return false;
    const size_t width = second_bytes_of(format);
    for (size_t i = 0; i < n; ++i) {
      float a, b;
      std::memcpy(&a, data.at() + i * sizeof a, sizeof a);
      std::memcpy(&b, other.data.at() + i * sizeof b, sizeof b);
      const bool differ =
          std::memcmp(&a, &b, sizeof a) != 0 ||
          std::memcmp(second.at() + i * width, other.second.at() + i * width, width);
      if (differ && !(std::isnan(a) && std::isnan(b))) return false;
    }
    return true;
  }

  void fill(const std::vector<float>& x, bool clamp) {
    if (!exists) return;
    const Array from = {const_cast<float*>(x.data()), F::float32};
    const Transfer t = {int64_t(n), array(), from, clamp, random_stream(5, 1, 7, false)};
    cpu::copy(&t, 1, 1.0, 1);
  }

  // Writes into some of the weights of masters in two parts, as users do: zeros of both signs, an
  // infinity, and what no step would leave beside the second part.
  void write_weights(bool infinite) {
    if (!exists || !is_split(format)) return;
    auto* weights = reinterpret_cast<uint16_t*>(width_of(format) == 4 ? second.at() : data.at());
    const uint16_t infinity = dtype_is_bfloat16() ? 0x7F80 : 0x7C00;
    for (size_t i = 0; i < n; ++i) {
      if (i % 5 == 0) weights[i] = i % 2 ? 0x8000 : 0;
      if (i % 7 == 3) weights[i] ^= 0x0155;
      if (infinite && i % 1009 == 8) weights[i] = infinity;
    }
  }
  bool dtype_is_bfloat16() const {
    return format == F::bfloat16_float32 || format == F::bfloat16_split32 ||
           format == F::bfloat16_split24 || format == F::bfloat16_split20;
  }

  // Groups that no step has stored yet, all of them zero, and groups of NaN.
  void write_groups() {
    if (!exists || !is_grouped(format)) return;
    const size_t width = second_bytes_of(format);
    const uint16_t nan = format == F::log8 ? Log8Group::store(Log8Group::scale(kInfinity))
                                           : M8Group::store(M8Group::scale(kInfinity)).bits;
    for (size_t g = 0; g < n / kGroup; ++g) {
      if (g % 5 == 2) std::memcpy(second.at() + g * width, &nan, width);
      if (g % 3 != 1) continue;
      std::memset(second.at() + g * width, 0, width);
      std::memset(data.at() + g * kGroup, 0, kGroup);
    }
  }

  void fill_with_any_bits(std::mt19937& random) {
    for (const Memory* m : {&data, &second})
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

size_t to_groups(size_t n, size_t group = kGroup) { return (n + group - 1) / group * group; }

}  // namespace
