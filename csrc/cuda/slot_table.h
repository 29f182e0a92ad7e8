#pragma once
// The slots of an apply or moments pass as a kernel argument, and how a kernel reads them.
#include "cuda/convert.h"
#include "cuda/tensor_table.h"

namespace amp_mp::cuda {

// Index of a slot's arrays in the table. kSecond is the rest of a master of two
// parts, or the copy to write of a float32 weight; a slot never has both. The states are followed
// by the scales of state 0, the only state that may be stored in m8.
enum SlotArray { kGrad, kSecond, kMaster, kState0 };

constexpr int kFormatBits = 4;  // bits of the tag for each array
static_assert(kFormatCount <= 1 << kFormatBits && (kState0 + kMaxStates) * kFormatBits <= 32);

// Where a slot's random bits come from: core/random.h's Origin and the tensor.
struct RandomOrigin {
  int64_t first;
  uint32_t tensor_index;
  int32_t rows;  // index in SlotTable::rows
};

constexpr int kMaxRows = 8;  // kinds of rows in one launch, the first for slots without gaps

template <class Rule>
constexpr int kScales = kState0 + Rule::kStates;

// A model's shards have few kinds of rows; two more numbers for each slot would take a tenth of the
// slots of a launch.
template <class Rule>
struct SlotTable : TensorTable<kScales<Rule> + 1, RandomOrigin, (kMaxRows + 1) * sizeof(Rows)> {
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

__device__ __forceinline__ Format format_of(uint32_t tag, int array) {
  return Format(tag >> (array * kFormatBits) & ((1 << kFormatBits) - 1));
}

// One slot in a kernel.
template <class Rule>
struct View {
  Array grad, master, copy, state[kMaxStates] = {};
  const SlotTable<Rule>& table;
  const SlotRule<Rule>* slot_rules;  // of all slots of the call
  int slot;                          // index in the table
  bool wide;                         // every array starts at a multiple of 16 bytes

  __device__ __forceinline__ View(const SlotTable<Rule>& table, const SlotRule<Rule>* slot_rules,
                                  int slot)
      : table(table), slot_rules(slot_rules), slot(slot), wide(true) {
    const uint32_t tag = table.tag[slot];
    const auto array_at = [&](int array) {
      return Array{table.data[array][slot], format_of(tag, array), nullptr};
    };
    grad = array_at(kGrad);
    master = array_at(kMaster);
    copy = array_at(kSecond);
    for (int k = 0; k < Rule::kStates; ++k) state[k] = array_at(kState0 + k);
    if (is_split(master.format)) {
      master.rest = copy.data;
      copy.data = nullptr;
    }
    state[0].rest = table.data[kScales<Rule>][slot];
    for (int a = 0; a < kScales<Rule>; ++a)  // a missing array is wide
      wide = wide && is_wide(table.data[a][slot]);
  }

  __device__ __forceinline__ bool draws() const {
    return is_stochastic(state[0].format) || is_stochastic(state[1].format);
  }
  __device__ __forceinline__ const SlotRule<Rule>& slot_rule() const {
    return slot_rules[table.first_index + slot];
  }
  __device__ __forceinline__ uint64_t random(bool of_weights, int64_t at) const {
    View own = *this;
    asm volatile("" : "+r"(own.slot));  // or all these numbers stay in registers, and kernels spill
    const RandomOrigin& origin = table.extra[own.slot];
    const SlotRule<Rule>& rule = own.slot_rule();
    return random_bytes(random_stream(rule.seed, rule.step, origin.tensor_index, of_weights),
                        origin.first, table.rows[origin.rows], at);
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
    table.tag[t] = 0;
    for (int a = 0; a < kScales<Rule>; ++a) {
      table.data[a][t] = arrays[a].data;
      table.tag[t] |= uint32_t(arrays[a].format) << (a * kFormatBits);
    }
    table.data[kScales<Rule>][t] = s.state[0].rest;
    table.extra[t] = {s.origin.first, s.tensor_index, rows};
    table.add(s.size);
  }
}

}  // namespace amp_mp::cuda
