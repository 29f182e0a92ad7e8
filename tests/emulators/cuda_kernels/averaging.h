#pragma once
// Averaging passes of both sides, between all pairs of formats: masters in any, and averages, which
// draw no random bits.
#include "cuda/tensor_table.h"
#include "measuring.h"

namespace {

std::vector<Format> formats_of_masters(bool of_averages) {
  std::vector<Format> list;
  for (int f = 0; f < kFormatCount; ++f) {
    const bool is_written = !kFormats[f].is(kRandom), is_read = is_written || is_split(Format(f));
    if (kFormats[f].is(kForMaster) && (of_averages ? is_written : is_read))
      list.push_back(Format(f));
  }
  return list;
}

// Averages and their next values.
struct Averages {
  std::vector<StoredArray> to, from;

  Averages(const std::vector<size_t>& sizes, size_t count, unsigned seed) {
    const std::vector<Format> written = formats_of_masters(true), read = formats_of_masters(false);
    std::mt19937 random(seed);
    const auto skew = [&] { return random() % 4 == 0 ? 1 + random() % 7 : 0; };
    for (size_t p = 0; p < count; ++p) {
      const Format source = read[p / written.size() % read.size()];
      const size_t n = to_groups(sizes[p % sizes.size()], group_of(source));
      to.emplace_back(n, written[p % written.size()], skew(), skew());
      from.emplace_back(n, source, skew(), skew());
      const bool tiny = random() % 4 == 0;  // below the smallest float16
      to[p].fill(numbers(n, p, tiny ? 1e-8f : 3.0f), true);
      if (random() % 4 == 0) {
        from[p].fill_with_any_bits(random);
      } else {
        from[p].fill(numbers(n, p + 1, tiny ? 1e-8f : 1e5f), true);
      }
    }
  }

  std::vector<Transfer> transfers() const {
    std::vector<Transfer> list;
    for (size_t p = 0; p < to.size(); ++p)
      list.push_back({int64_t(to[p].n), to[p].array(), from[p].array(), true, {}});
    return list;
  }
};

void average_both(const std::vector<size_t>& sizes, size_t count) {
  const Averages before(sizes, count, 5), wanted = before, found = before;
  for (const double decay : {0.999, 0.25, 0.0, 1.0}) {
    cpu::average(wanted.transfers().data(), int64_t(count), decay, 1);
    expect(!cuda::average(found.transfers().data(), int64_t(count), decay, nullptr),
           "average is launched", "", count);
    for (size_t p = 0; p < count; ++p)
      expect(found.to[p].same(wanted.to[p]) && found.from[p].same(before.from[p]), "average in",
             kFormatNames[int(found.to[p].format)], p);
  }
  std::printf("average: %zu tensors\n", count);
}

}  // namespace
