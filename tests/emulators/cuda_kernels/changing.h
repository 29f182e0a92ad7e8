#pragma once
// Finding changes and putting them elsewhere, by both sides.
#include <numeric>

#include "cuda/tensor_table.h"
#include "measuring.h"

namespace {

constexpr Format kWatchedFormats[3] = {F::bfloat16, F::float32, F::float16};

// Watched tensors, with bits of all densities; some have no notes.
struct WatchedTensors {
  std::vector<StoredArray> weights;
  std::vector<std::vector<uint64_t>> notes;
  std::vector<Origin> origins;

  WatchedTensors(const std::vector<size_t>& sizes, size_t count) {
    std::mt19937_64 random(9);
    for (size_t p = 0; p < count; ++p) {
      const size_t n = sizes[p % sizes.size()];
      weights.emplace_back(n, kWatchedFormats[p % 3], random() % 4 == 0 ? 1 + random() % 7 : 0, 0);
      weights[p].fill(numbers(n, p, 3.0f), true);
      std::vector<uint64_t>& own = notes.emplace_back();
      origins.push_back(p % 2 ? Origin{int64_t(random() % 1000), 0, 0}
                              : Origin{int64_t(random() % 1000), 7, int64_t(7 + random() % 50)});
      if (p % 7 == 6) continue;
      own.resize(1 + size_t(ceil_divide(int64_t(n), 64)));
      own[0] = random() & 0xFFFFFFFFu;
      const uint64_t one_in = uint64_t(1) << (p % 5 * 3);  // all, an eighth, ... one in 4,096
      for (size_t i = 0; i < n; ++i)
        if (random() % one_in == 0) own[1 + i / 64] |= uint64_t(1) << i % 64;
    }
  }

  std::vector<Watched> watched(std::vector<Look>& found) {
    std::vector<Watched> list;
    for (size_t p = 0; p < weights.size(); ++p)
      list.push_back({int64_t(weights[p].n), weights[p].array(), changes(p), &found[p]});
    return list;
  }

  Changes changes(size_t p) {
    return {notes[p].empty() ? nullptr : notes[p].data(),
            weights[p].format == F::float16 || p % 2 ? F::float16 : F::bfloat16};
  }
};

// What one side has taken.
struct Gathered {
  std::vector<std::vector<int64_t>> wide;
  std::vector<std::vector<int32_t>> narrow;
  std::vector<std::vector<uint16_t>> values;

  // Room for them, and the list; tensors without notes have no positions.
  std::vector<Gathering> prepare(WatchedTensors& from, const std::vector<int64_t>& ends) {
    std::vector<Gathering> list;
    const size_t count = from.weights.size();
    wide.resize(count), narrow.resize(count), values.resize(count);
    size_t chunk = 1;
    for (size_t p = 0; p < count; ++p) {
      const auto size = int64_t(from.weights[p].n);
      Gathering& g = list.emplace_back();
      const size_t after = chunk + size_t(ceil_divide(size, kLookChunk));
      const auto bits = size_t(ends[after - 1] - ends[chunk - 1]);
      if (!from.notes[p].empty()) {
        const bool is_wide = p % 3 == 1;
        (is_wide ? wide[p].resize(bits) : narrow[p].resize(bits)), values[p].resize(bits);
        void* const positions = is_wide ? static_cast<void*>(wide[p].data()) : narrow[p].data();
        g = {size,      from.weights[p].array(), from.changes(p), &ends[chunk],
             positions, values[p].data(),        from.origins[p], is_wide};
      }
      chunk = after;
    }
    return list;
  }
};

// Writes into tensors of all widths, with and without a position that lies outside.
void scatter_both(size_t count, size_t size) {
  std::mt19937_64 random(11);
  std::vector<std::vector<int64_t>> wide(count);
  std::vector<std::vector<int32_t>> narrow(count);
  std::vector<std::vector<uint8_t>> values(count), before(count), wanted, found;
  std::vector<Scattering> list;
  for (size_t p = 0; p < count; ++p) {
    const size_t width = size_t(1) << p % 4, n = p % 5 * size / 4;
    for (size_t i = 0; i < n; ++i)
      (wide[p].push_back(int64_t(3 * i)), narrow[p].push_back(int32_t(3 * i)));
    values[p].resize(n * width), before[p].resize(3 * size * width);
    for (uint8_t& x : values[p]) x = uint8_t(random());
    for (uint8_t& x : before[p]) x = uint8_t(random());
    const bool is_wide = p / 4 % 2;
    const void* const positions = is_wide ? static_cast<void*>(wide[p].data()) : narrow[p].data();
    list.push_back(
        {int64_t(n), positions, values[p].data(), nullptr, int64_t(3 * size), int(width), is_wide});
  }
  wanted = found = before;
  const auto into = [&](std::vector<std::vector<uint8_t>>& to) {
    for (size_t p = 0; p < count; ++p) list[p].to = to[p].data();
    return list.data();
  };
  cpu::scatter(into(wanted), int64_t(count), 1);
  expect(!cuda::scatter(into(found), int64_t(count), nullptr), "scatter is launched", "", count);
  for (size_t p = 0; p < count; ++p) expect(found[p] == wanted[p], "scatter in", "", p);
  for (size_t p = 0; p < count; ++p) {
    if (!narrow[p].empty() && p % 3 == 0) {
      wide[p].back() = p % 2 ? -1 : int64_t(3 * size);
      narrow[p].back() = int32_t(wide[p].back());
    }
  }
  std::vector<int32_t> bad_on_cpu(count), bad(count);
  cpu::check_positions(into(wanted), int64_t(count), bad_on_cpu.data(), 1);
  cuda::check_positions(into(found), int64_t(count), bad.data(), nullptr);
  for (size_t p = 0; p < count; ++p)
    expect(bad[p] == bad_on_cpu[p] && bad[p] == (!narrow[p].empty() && p % 3 == 0),
           "positions that are outside of", "", p);
}

void change_both(const std::vector<size_t>& sizes, size_t count) {
  WatchedTensors tensors(sizes, count);
  std::vector<Look> wanted(count), found(count);
  int64_t chunks = 0;
  for (const StoredArray& each : tensors.weights)
    chunks += ceil_divide(int64_t(each.n), kLookChunk);
  std::vector<int32_t> counts(1 + size_t(chunks)), on_cuda = counts;
  cpu::count_bits(tensors.watched(wanted).data(), int64_t(count), counts.data() + 1, 1);
  std::vector<int64_t> ends(counts.size());
  std::partial_sum(counts.begin(), counts.end(), ends.begin(),
                   [](int64_t sum, int64_t own) { return sum + own; });
  Gathered own, theirs;
  cpu::look(tensors.watched(wanted).data(), own.prepare(tensors, ends).data(), int64_t(count), 1);
  expect(!cuda::look(tensors.watched(found).data(), int64_t(count), on_cuda.data() + 1, nullptr),
         "look is launched", "", count);
  expect(counts == on_cuda, "bits of chunks", "", count);
  std::vector<Gathering> gatherings;
  for (const Gathering& g : theirs.prepare(tensors, ends))
    if (g.positions || g.values) gatherings.push_back(g);
  cuda::gather(gatherings.data(), int64_t(gatherings.size()), nullptr);
  for (size_t p = 0, chunk = 1; p < count; ++p) {
    const char* const format = kFormatNames[int(tensors.weights[p].format)];
    const size_t after = chunk + size_t(ceil_divide(int64_t(tensors.weights[p].n), kLookChunk));
    const bool is_noted = !tensors.notes[p].empty() && tensors.weights[p].n > 0;
    expect(found[p].sum == wanted[p].sum, "the sum of", format, p);
    expect(found[p].noted == (is_noted ? tensors.notes[p][0] : 0), "the notes' sum of", format, p);
    expect(found[p].bits == uint64_t(ends[after - 1] - ends[chunk - 1]), "the bits of", format, p);
    expect(own.wide[p] == theirs.wide[p] && own.narrow[p] == theirs.narrow[p], "positions of",
           format, p);
    expect(own.values[p] == theirs.values[p], "values of", format, p);
    chunk = after;
  }
  scatter_both(count, sizes.back() < 100 ? 5 : 300);
  std::printf("changes: %zu tensors\n", count);
}

}  // namespace
