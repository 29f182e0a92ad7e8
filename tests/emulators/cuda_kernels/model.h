#pragma once
// What compare.cpp updates, copies and measures: lists of tensors in which every format meets every
// other.
#include <array>

#include "arrays.h"

namespace {

// The cycles of the formats have lengths without a common factor, so that after 390 tensors each
// has met all others, and a few tensors already have a bit of everything.
struct Kept {
  Format master;
  bool has_copy;
  Format copy;  // of a float32 weight
};
constexpr Kept kKept[13] = {
    {F::float32, true, F::bfloat16},  // every second time beside F::float16
    {F::bfloat16_split24, false, {}},   {F::bfloat16_stochastic, false, {}},
    {F::bfloat16_float32, false, {}},   {F::bfloat16_split20, false, {}},
    {F::float16_split24, false, {}},    {F::float16, false, {}},
    {F::bfloat16_split32, false, {}},   {F::float16_float32, false, {}},
    {F::float16_stochastic, false, {}}, {F::float32, false, {}},
    {F::float16_split32, false, {}},    {F::bfloat16, false, {}},
};
// Every second time i8 in place of m8.
constexpr Format kMoments[5] = {F::m8, F::float32, F::bfloat16_stochastic, F::float16, F::bfloat16};
constexpr Format kFirstSquares[10] = {
    F::log8,  F::ue8m8,   F::float32, F::float16,      F::float16_root, F::bfloat16_stochastic,
    F::ue8m8, F::float32, F::float16, F::float16_root,
};
constexpr Format kSquares[6] = {F::ue8m8, F::float32, F::float16_root, F::bfloat16_stochastic,
                                F::log8,  F::bfloat16};
constexpr int kAllPairs = 390;

// What the apply kernel is compiled for (cuda/layouts.h): master, a moment, a mean of squares.
struct Preset {
  Kept kept;
  Format moment, square;
};
constexpr Preset kPresets[8] = {
    {{F::float32, false, {}}, F::float32, F::float32},
    {{F::float32, true, F::bfloat16}, F::float32, F::float32},
    {{F::bfloat16_split32, false, {}}, F::float32, F::float32},
    {{F::bfloat16_split24, false, {}}, F::bfloat16_stochastic, F::ue8m8},
    {{F::bfloat16_split24, false, {}}, F::m8, F::ue8m8},
    {{F::bfloat16_split24, false, {}}, F::m8, F::log8},
    {{F::bfloat16_split20, false, {}}, F::m8, F::log8},
    {{F::bfloat16_split24, false, {}}, F::m8, F::float32},  // of no preset, but like two of them
};

struct Shape {
  std::vector<size_t> sizes;
  int per_group;
  size_t offset = 0;  // in the cycles
  bool presets = false;
};

enum Role { kGrad, kCopy, kMaster, kState0, kState1, kState2, kRoles };

struct Tensor {
  std::array<StoredArray, kRoles> arrays;
  Clock clock;

  bool same(const Tensor& other) const {
    for (int r = 0; r < kRoles; ++r)
      if (!arrays[r].same(other.arrays[r])) return false;
    return !std::memcmp(&clock, &other.clock, sizeof clock);
  }
};

// Beside the bits of squares: the last state is a direction (Muon).
constexpr int kHasDirection = 1 << kMaxStates;
// Which of a rule's states are means or sums of squares, as a set of bits.
int squares_of(const RuleInfo& rule) {
  int found = rule.has_direction ? kHasDirection : 0;
  for (int k = 0; k < rule.kept.count; ++k)
    if (rule.kept.of[k].kind == Kind::square) found |= 1 << k;
  return found;
}

// Whether a state of tensor number t may be stored in groups.
bool has_groups(size_t t) { return t % 5 == 0 || t % 6 == 4; }

Tensor make_tensor(size_t n, size_t t, bool presets, bool bad, int states, int squares) {
  // Most tensors are aligned, some in all but one array, few in none.
  const auto skew = [&](size_t which) {
    return t % 16 == 2 || (t % 4 == 1 && t / 4 % 9 == which) ? 1 + t % 7 : 0;
  };
  const Preset& preset = kPresets[t % 8];
  Kept kept = presets ? preset.kept : kKept[t % 13];
  if (kept.has_copy && !presets && t / 13 % 2 == 1) kept.copy = F::float16;
  if (n % group_of(kept.master) != 0) kept.master = F::bfloat16_split24;
  const auto whole_groups = [&](Format f) {
    return n % group_of(f) != 0 ? F::bfloat16_stochastic : f;
  };
  // Cycles of 10 and 6 tensors have half of their pairs; the shift makes the others, too.
  const size_t shift = squares == 0b11 ? t / 30 : 0;
  const Format of_square = presets ? preset.square : kSquares[(t + shift) % 6],
               of_first = presets ? preset.square : kFirstSquares[t % 10],
               of_moment = presets       ? preset.moment
                           : t % 10 == 5 ? F::i8
                                         : kMoments[t % 5];
  const Format first = whole_groups(squares & 0b1 ? of_first : of_moment),
               second = whole_groups(squares & kHasDirection ? F::bfloat16
                                     : squares & 0b10        ? of_square
                                                             : F::float32);
  constexpr Format kGrads[] = {F::bfloat16, F::float32, F::float16};
  Tensor x;
  x.arrays[kGrad] = StoredArray(n, kGrads[(t + t / 13) % 3], skew(0), 0);
  if (kept.has_copy) x.arrays[kCopy] = StoredArray(n, kept.copy, skew(1), 0);
  x.arrays[kMaster] = StoredArray(n, kept.master, skew(2), skew(3));
  if (states > 0) x.arrays[kState0] = StoredArray(n, first, skew(4), skew(5));
  if (states > 1) x.arrays[kState1] = StoredArray(n, second, skew(6), skew(8));
  if (states > 2) x.arrays[kState2] = StoredArray(n, F::float32, skew(7), 0);

  // Some so small that squares need care, some weights beyond float16, where it saturates.
  const bool still = t % 19 == 5;
  const float w_spread = still || t % 13 == 2 ? 1e-20f : t % 9 == 7 ? 1e5f : 1.0f;
  std::vector<float> g = numbers(n, 5 * t, still ? 1e-20f : 8.0f),
                     w = numbers(n, 5 * t + 1, w_spread), s1 = numbers(n, 5 * t + 3, 1e-2f, true),
                     s2 = numbers(n, 5 * t + 4, 1e-2f, true);
  if (t % 4 != 3)  // some elements without gradients
    for (size_t i = 3; i < n; i += 40) g[i] = s1[i] = s2[i] = 0;
  if (n > 0 && t % 17 == 6) w[n - 1] = std::nanf("");
  if (n > 0 && t % 17 == 9) w[n / 2] = 1e30f;  // whose square overflows
  if (bad && n > 1) {
    g[n - 1] = w[n / 2] = HUGE_VALF;
    g[0] = w[0] = std::nanf("");
  }
  x.arrays[kGrad].fill(g, false);
  x.arrays[kCopy].fill(w, true);
  x.arrays[kMaster].fill(w, true);
  if (t % 3 == 1) x.arrays[kMaster].write_weights(!bad);
  x.arrays[kState0].fill(numbers(n, 5 * t + 2, still ? 1e-20f : 1e-2f, squares & 0b1), true);
  x.arrays[kState1].fill(s1, true);
  x.arrays[kState2].fill(s2, true);
  // CenteredRMSprop makes NaN of its own, and a sum of two has the sign of either.
  if (t % 3 == 1 && states < 3)
    for (const Role r : {kState0, kState1}) x.arrays[r].write_groups();
  // Steps that began later, and as many steps with another number of the rule's own.
  x.clock = t % 6 == 5   ? Clock{0, 1, 1, 0}
            : t % 6 == 4 ? Clock{2, 0.81, 0.998, 1.5}
                         : Clock{2, 0.81, 0.998, 3.5};
  return x;
}

struct Model {
  std::vector<Tensor> tensors;
  int per_group;

  Model(const Shape& shape, bool bad, int states, int squares) : per_group(shape.per_group) {
    for (size_t t = 0; t < shape.sizes.size(); ++t)
      tensors.push_back(
          make_tensor(shape.sizes[t], t + shape.offset, shape.presets, bad, states, squares));
  }

  int64_t count() const { return int64_t(tensors.size()); }

  // Whole tensors, shards without gaps and shards of rows, so many kinds of them that one launch
  // cannot take all; rows that end between the eight elements of a thread, and rows shorter; two
  // kinds that differ in their distance alone.
  static Origin origin(size_t t) {
    const int64_t first = t % 5 < 3    ? 0
                          : t % 5 == 3 ? int64_t(1000003 + t)
                                       : (int64_t(1) << 37) - 300 - int64_t(t);
    constexpr int64_t kLengths[] = {0, 0,  33,   40, 40, 0,    8,  1,  256,
                                    0, 49, 1000, 0,  7,  4104, 64, 129};
    const int64_t length = kLengths[t % std::size(kLengths)];
    return {first, length, length + int64_t(t % 3) * 333};
  }

  // Rows of statistics have gaps, as for parameters without a gradient.
  static int64_t row(size_t t) { return int64_t(t + (t + 2) / 3); }

  std::vector<Slot> slots() {
    std::vector<Slot> list;
    for (size_t t = 0; t < tensors.size(); ++t) {
      auto& a = tensors[t].arrays;
      Slot s = {};
      s.size = int64_t(a[kGrad].n);
      s.grad = a[kGrad].array();
      s.copy = a[kCopy].array();
      s.master = a[kMaster].array();
      for (int k = 0; k < kMaxStates; ++k) s.state[k] = a[kState0 + k].array();
      s.clock = &tensors[t].clock;
      s.group = int32_t(t / size_t(per_group));
      s.tensor_index = uint32_t(t * 0x9E3779B9u);
      s.origin = origin(t);
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
    for (int64_t g = 0; g <= count() / per_group; ++g) {
      list.push_back({1e-3 * double(g + 1), 0.9, 0.999, g % 7 == 3 ? 0 : 1e-8,
                      g % 3 == 2 ? 0 : 0.01, 0.9, 0.1, 0.01, 1e-3,
                      uint64_t(g + 1) * 0x123456789ABCDEFu, g % 3 == 1, g % 2 == 1, g % 4 < 2,
                      g % 5 == 2, g % 4 == 1});
      list.back().cautious = g % 3 == 0;
    }
    return list;
  }
};

const std::vector<size_t> kEdges = {1, 8, 0, 257, 31, 2049, 64, 9, 4097, 256, 700, 7, 513};
const std::vector<size_t> kTiny = {3, 0, 9, 1, 8, 33, 0, 5};
const std::vector<size_t> kRagged = {
    0,  1,    7,  8,  9,     0,     63,    64, 65, 4095, 4096,  4097, 16383, 16384, 16385, 3,
    49, 2049, 15, 17, 65535, 65536, 65537, 31, 0,  33,   70001, 2,    12320, 100,   65568};

// `count` sizes in which `cycle` repeats; where a state may be stored in groups, whole groups.
Shape repeated(const std::vector<size_t>& cycle, size_t count, int per_group, size_t offset = 0) {
  Shape shape = {{}, per_group, offset};
  for (size_t t = 0; t < count; ++t) {
    const size_t n = cycle[t % cycle.size()];
    shape.sizes.push_back(has_groups(t + offset) ? to_groups(n) : n);
  }
  return shape;
}

// The presets in sizes of whole groups, and with every kind of gradient.
Shape presets() {
  Shape shape = {{}, 5, 0, true};
  for (size_t t = 0; t < 8 * 13; ++t) shape.sizes.push_back(to_groups(kEdges[t % kEdges.size()]));
  return shape;
}

}  // namespace
