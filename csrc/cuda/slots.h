#pragma once
// The slots of an apply pass as a kernel argument, and how a kernel reads them.
#include "cuda/convert.h"
#include "cuda/table.h"

namespace amp_mp::cuda {

// Of the arrays of a slot. kSecond: the weight to write beside the master, or a split master's
// remainders, never both. After the states, the scales of state 0, the only one that may be in m8.
enum Array { kGrad, kSecond, kMaster, kState0 };

constexpr int kFormatBits = 4;  // of an array in the tag
static_assert(kFormats <= 1 << kFormatBits && (kState0 + kMaxStates) * kFormatBits <= 32);

struct Place {  // of a tensor's elements, for its random bits
  int64_t first;
  uint32_t number;
};

template <class Rule>
constexpr int kScales = kState0 + Rule::kStates;
template <class Rule>
using SlotTable = Table<kScales<Rule> + 1, 0, Place>;

__device__ __forceinline__ Format format_of(uint32_t tag, int array) {
  return Format(tag >> (array * kFormatBits) & ((1 << kFormatBits) - 1));
}

// One slot, as its threads see it.
template <class Rule>
struct View {
  Span grad, weight, master, state[kMaxStates] = {};
  // Looked up where they are needed: held in registers, they would make the kernels spill.
  const Ready<Rule>& ready;
  const Place& place;
  bool wide;  // every array starts at a multiple of 16 bytes

  __device__ __forceinline__ View(const SlotTable<Rule>& table, const Ready<Rule>* all, int slot)
      : ready(all[table.first_index + slot]), place(table.place[slot]), wide(true) {
    const uint32_t tag = table.tag[slot];
    const auto span = [&](int array) {
      return Span{table.data[array][slot], format_of(tag, array), nullptr};
    };
    grad = span(kGrad);
    weight = span(kSecond);
    master = span(kMaster);
    for (int k = 0; k < Rule::kStates; ++k) state[k] = span(kState0 + k);
    if (is_split(master.format)) {
      master.rest = weight.data;
      weight.data = nullptr;
    }
    state[0].rest = table.data[kScales<Rule>][slot];
    for (int a = 0; a < kScales<Rule>; ++a)  // a missing array is wide
      wide = wide && is_wide(table.data[a][slot]);
  }

  __device__ __forceinline__ bool draws() const {
    return is_stochastic(state[0].format) || is_stochastic(state[1].format);
  }
  __device__ __forceinline__ uint64_t random(bool of_weights, int64_t at) const {
    return random_bytes(stream_of(ready.seed, ready.step, place.number, of_weights),
                        uint64_t(place.first + at));
  }
};

// Takes as many slots from `i` on as fit one launch.
template <class Rule>
void take(SlotTable<Rule>& table, const Slot* slots, int64_t& i, int64_t count, int chunk,
          int64_t chunks) {
  table.begin(i, chunks, chunk);
  for (; i < count && !table.full(); ++i) {
    const Slot& s = slots[i];
    const int t = table.count;
    const Span second = is_split(s.master.format) ? Span{s.master.rest, Format::float32} : s.weight;
    const Span arrays[] = {s.grad, second, s.master, s.state[0], s.state[1], s.state[2]};
    table.tag[t] = 0;
    for (int a = 0; a < kScales<Rule>; ++a) {
      table.data[a][t] = arrays[a].data;
      table.tag[t] |= uint32_t(arrays[a].format) << (a * kFormatBits);
    }
    table.data[kScales<Rule>][t] = s.state[0].rest;
    table.place[t] = {s.first, s.number};
    table.add(s.size);
  }
}

}  // namespace amp_mp::cuda
