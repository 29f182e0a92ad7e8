#pragma once
// The slots of an apply or moments pass as a kernel argument, and how a kernel reads them.
#include "cuda/access.h"
#include "cuda/layouts.h"
#include "cuda/tensor_table.h"

namespace amp_mp::cuda {

// The formats that a rule's state number K may be stored in.
template <class Rule, int K>
constexpr FormatSet kFormatsOfState = Rule::kSquares == K ? kSquareFormats
                                      : K == 0            ? formats_with(kForMoment)
                                                          : just(Format::float32);
template <class Rule, int K>
constexpr bool kHasScales = K < Rule::kStates && (kFormatsOfState<Rule, K> & kGroupedFormats) != 0;
static_assert(kGroupedStates == 2);

// Whether the kernels are compiled for the formats of a slot's states.
template <class Rule>
bool is_compiled(const Slot& s) {
  const auto is = [](bool has, FormatSet formats, const Array& state) {
    return !has || is_in(formats, state.format);
  };
  return is(Rule::kStates > 0, kFormatsOfState<Rule, 0>, s.state[0]) &&
         is(Rule::kStates > 1, kFormatsOfState<Rule, 1>, s.state[1]) &&
         is(Rule::kStates > 2, kFormatsOfState<Rule, 2>, s.state[2]);
}

template <class Rule>
constexpr int kArrays = kState0 + Rule::kStates;
template <class Rule>
constexpr int kPointers = kArrays<Rule> + kHasScales<Rule, 0> + kHasScales<Rule, 1>;

// The tag has the arrays' formats, and above them an index in SlotTable::rows.
constexpr int kRowsAt = (kState0 + kMaxStates) * kFormatBits;
constexpr int kMaxRows = 8;  // kinds of rows in one launch, the first for slots without gaps
static_assert(kMaxRows << kRowsAt > 0);

// Where a slot's random bits come from: the tensor and its shard's first element, as two words,
// because an int64_t would need alignment.
struct RandomOrigin {
  uint32_t tensor_index, first[2];
};

// A model's shards have few kinds of rows; two more numbers for each slot would take a tenth of the
// slots of a launch.
template <class Rule>
struct SlotTable : TensorTable<kPointers<Rule>, RandomOrigin, (kMaxRows + 1) * sizeof(Rows)> {
  Rows rows[kMaxRows];
  int32_t kinds;

  // Index of the rows of this origin; kMaxRows if there is no room for another kind.
  int rows_of(const Origin& o) {
    const Rows wanted = Rows::of(o);
    int r = 0;
    while (r < kinds && (rows[r].length != wanted.length || rows[r].stride != wanted.stride)) ++r;
    if (r == kinds && r < kMaxRows) rows[kinds++] = wanted;
    return r;
  }
};

// Where a slot's random bytes come from, made once: making it needs numbers of the slot's rule.
struct Randomness {
  RandomStream stream;
  int64_t first;     // element 0 of the shard in the whole tensor
  const Rows* rows;  // null: no gaps

  // The random bytes of elements at to at + 7, `at` being a multiple of 8.
  __device__ __forceinline__ uint64_t eight(bool of_weights, int64_t at) const {
    RandomStream own = stream;
    own.of_weights = of_weights ? 1u << 31 : 0;
    return rows ? random_bytes(own, first, *rows, at) : random_bytes(own, uint64_t(first + at));
  }
};

// One slot in a kernel. `Layout` has the formats that are known when compiling (cuda/layouts.h).
template <class Rule, uint32_t Layout = kAnyTag>
struct View {
  Array grad, master, copy, state[kMaxStates] = {};
  const SlotTable<Rule>& table;
  int slot;   // index in the table
  bool wide;  // every array starts at a multiple of 16 bytes

  __device__ __forceinline__ View(const SlotTable<Rule>& table, int slot)
      : table(table), slot(slot), wide(true) {
    const uint32_t tag = table.tag[slot];
    const auto array_at = [&](int array) {
      return Array{table.data[array][slot], format_in<Layout>(tag, array), nullptr};
    };
    grad = array_at(kGrad);
    master = array_at(kMaster);
    copy = array_at(kSecond);
    for (int k = 0; k < Rule::kStates; ++k) state[k] = array_at(kState0 + k);
    if (is_split(master.format)) {
      master.rest = copy.data;
      copy.data = nullptr;
    }
    if constexpr (kHasScales<Rule, 0>) state[0].rest = table.data[kArrays<Rule>][slot];
    if constexpr (kHasScales<Rule, 1>) state[1].rest = table.data[kPointers<Rule> - 1][slot];
    for (int a = 0; a < kArrays<Rule>; ++a)  // a missing array is wide
      wide = wide && is_wide(table.data[a][slot]);
  }

  __device__ __forceinline__ bool draws() const {
    return is_stochastic(state[0].format) || is_stochastic(state[1].format);
  }
  // The same slot, read again by a kernel that takes any format: it has more to keep than
  // registers.
  __device__ __forceinline__ View again() const {
    int own = slot;
    if constexpr (Layout == kAnyTag) asm volatile("" : "+r"(own));
    return View(table, own);
  }
  __device__ __forceinline__ Randomness randomness(const SlotRule<Rule>& rule) const {
    const RandomOrigin& origin = table.extra[slot];
    const Rows& rows = table.rows[table.tag[slot] >> kRowsAt];
    return {random_stream(rule.seed, rule.step, origin.tensor_index, false),
            int64_t(origin.first[0] | uint64_t(origin.first[1]) << 32),
            rows.length > 0 ? &rows : nullptr};
  }
};

// Fills the table with as many slots as fit one launch, from `i` on, and advances `i`.
template <class Rule>
void fill(SlotTable<Rule>& table, const Slot* slots, int64_t& i, int64_t count, int chunk,
          int64_t chunks) {
  table.reset(i, chunks, chunk);
  table.kinds = 0;
  table.rows_of(Origin{});
  for (; i < count && !table.full(); ++i) {
    const Slot& s = slots[i];
    const int rows = table.rows_of(s.origin);
    if (rows == kMaxRows) return;
    const int t = table.count;
    const Array second = is_split(s.master.format) ? Array{s.master.rest, Format::float32} : s.copy;
    const Array arrays[] = {s.grad, second, s.master, s.state[0], s.state[1], s.state[2]};
    table.tag[t] = uint32_t(rows) << kRowsAt;
    for (int a = 0; a < kArrays<Rule>; ++a) {
      table.data[a][t] = arrays[a].data;
      table.tag[t] |= uint32_t(arrays[a].format) << (a * kFormatBits);
    }
    if constexpr (kHasScales<Rule, 0>) table.data[kArrays<Rule>][t] = s.state[0].rest;
    if constexpr (kHasScales<Rule, 1>) table.data[kPointers<Rule> - 1][t] = s.state[1].rest;
    const auto first = uint64_t(s.origin.first);
    table.extra[t] = {s.tensor_index, {uint32_t(first), uint32_t(first >> 32)}};
    table.add(s.size);
  }
}

}  // namespace amp_mp::cuda
