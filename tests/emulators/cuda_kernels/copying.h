#pragma once
// Copy passes of both sides, between all pairs of formats.
#include <algorithm>

#include "cuda/tensor_table.h"
#include "measuring.h"

namespace {

constexpr double kFactor = 2e4;  // takes some numbers beyond float16

// Pairs of arrays to copy between; those of one format are one array, multiplied in place.
struct Pairs {
  std::vector<StoredArray> to, from;

  Pairs(const std::vector<size_t>& sizes, size_t count, unsigned seed) {
    std::mt19937 random(seed);
    for (size_t p = 0; p < count; ++p) {
      const Format target = Format(p % kFormatCount),
                   source = Format(p / kFormatCount % kFormatCount);
      const size_t n =
          to_groups(sizes[p % sizes.size()], std::max(group_of(target), group_of(source)));
      const auto skew = [&] { return random() % 4 == 0 ? 1 + random() % 7 : 0; };
      to.emplace_back(n, target, skew(), skew());
      from.emplace_back(n, source, skew(), skew());
      if (random() % 2 && target != F::log8) {  // which is for squares alone
        from[p].fill_with_any_bits(random);
      } else {
        const bool squares = !kFormats[p % kFormatCount].is(kForAll & ~kForSquare) ||
                             !kFormats[p / kFormatCount % kFormatCount].is(kForAll & ~kForSquare);
        std::vector<float> x = numbers(n, p, 3.0f, squares);
        for (size_t i = 5; i < n; i += 97) x[i] = i % 3 == 0 ? 0 : i % 3 == 1 ? HUGE_VALF : NAN;
        from[p].fill(x, true);
      }
    }
  }

  std::vector<Transfer> transfers() const {
    std::vector<Transfer> list;
    for (size_t p = 0; p < to.size(); ++p) {
      const bool in_place = to[p].format == from[p].format;
      const RandomStream random =
          random_stream(p * 0x123456789ABCDEFu, double(p), uint32_t(7 * p), p % 2);
      list.push_back({int64_t(to[p].n), in_place ? from[p].array() : to[p].array(), from[p].array(),
                      p % 5 < 2, random, Model::origin(p / 40)});
    }
    return list;
  }

  void expect_same(const Pairs& other, const char* what) const {
    for (size_t p = 0; p < to.size(); ++p)
      expect(to[p].same(other.to[p]) && from[p].same(other.from[p]), what,
             kFormatNames[int(to[p].format)], p);
  }
};

void copy_both(const std::vector<size_t>& sizes, size_t count) {
  const Pairs before(sizes, count, 3), wanted = before, found = before;
  const Verdict overflow = {1, 1, 0, 0, 1}, half = {0, 0.5, 0, 0, 1};
  const std::vector<Transfer> transfers = found.transfers();
  cuda::copy(transfers.data(), int64_t(count), &overflow, 1.0, nullptr);
  found.expect_same(before, "a skipped copy");
  cpu::copy(wanted.transfers().data(), int64_t(count), kFactor, 1);
  cuda::copy(transfers.data(), int64_t(count), nullptr, kFactor, nullptr);
  found.expect_same(wanted, "copy to");
  cpu::copy(wanted.transfers().data(), int64_t(count), 0.5, 1);
  cuda::copy(transfers.data(), int64_t(count), &half, 1.0, nullptr);
  found.expect_same(wanted, "copy with a verdict to");
  std::printf("copy: %zu tensors\n", count);
}

}  // namespace
