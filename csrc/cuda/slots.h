#pragma once
// The slots of an apply pass as a kernel argument, and how a kernel reads them.
#include "cuda/convert.h"
#include "cuda/table.h"

namespace amp_mp::cuda {

constexpr int kMaxGroups = 8;  // param_groups of one launch

struct Hypers {
  Hyper group[kMaxGroups];
};

// kSecond: the weight to write beside the master, or a split master's remainders, never both.
// kScales: of state 0, the only one that may be in m8.
enum Array { kGrad, kSecond, kMaster, kState0, kState1, kState2, kScales, kClock, kArrays };

// Formats four bits an array up to kScales, and the group in what is left.
constexpr int kFormatBits = 4;
static_assert(kFormats <= 1 << kFormatBits && kScales * kFormatBits + 4 <= 32);

struct Place {  // of a tensor's elements, for its random bits
  int64_t first;
  int64_t row;
  uint32_t number;
};

constexpr int kSlotExtra = int(sizeof(Hypers));
using SlotTable = Table<kArrays, kSlotExtra, Place>;

__device__ __forceinline__ Format format_of(uint32_t tag, int array) {
  return Format(tag >> (array * kFormatBits) & ((1 << kFormatBits) - 1));
}

__device__ __forceinline__ int group_of(uint32_t tag) {
  return int(tag >> (kScales * kFormatBits));
}

// One slot, as its threads see it.
struct View {
  Span grad, weight, master, state[kMaxStates];
  const Hyper& hyper;
  Clock* clock;
  Place place;
  bool wide;  // every array starts at a multiple of 16 bytes

  __device__ __forceinline__ View(const SlotTable& table, const Hypers& hypers, int slot)
      : hyper(hypers.group[group_of(table.tag[slot])]),
        clock(static_cast<Clock*>(table.data[kClock][slot])),
        place(table.place[slot]),
        wide(true) {
    const uint32_t tag = table.tag[slot];
    const auto span = [&](int array) {
      return Span{table.data[array][slot], format_of(tag, array), nullptr};
    };
    grad = span(kGrad);
    weight = span(kSecond);
    master = span(kMaster);
    for (int k = 0; k < kMaxStates; ++k) state[k] = span(kState0 + k);
    if (is_split(master.format)) {
      master.rest = weight.data;
      weight.data = nullptr;
    }
    state[0].rest = table.data[kScales][slot];
    for (int a = 0; a < kScales; ++a)  // a missing array is wide
      wide = wide && is_wide(table.data[a][slot]);
  }

  __device__ __forceinline__ bool draws() const {
    return is_stochastic(state[0].format) || is_stochastic(state[1].format);
  }
  __device__ __forceinline__ uint64_t random(bool of_weights, int64_t at) const {
    return random_bytes(stream_of(hyper.seed, clock->step, place.number, of_weights),
                        uint64_t(place.first + at));
  }
};

// Takes as many slots from `i` on as fit one launch. Slots come in the order of their groups.
inline void take(SlotTable& table, Hypers& hypers, const Slot* slots, int64_t& i, int64_t count,
                 const Hyper* all, int chunk, int64_t chunks) {
  table.begin(i, chunks);
  hypers = {};
  const int first_group = slots[i].group;
  for (; i < count && !table.full() && slots[i].group - first_group < kMaxGroups; ++i) {
    const Slot& s = slots[i];
    const int t = table.count, group = s.group - first_group;
    hypers.group[group] = all[s.group];
    const Span second = is_split(s.master.format) ? Span{s.master.rest, Format::float32} : s.weight;
    const Span arrays[kScales] = {s.grad, second, s.master, s.state[0], s.state[1], s.state[2]};
    table.tag[t] = uint32_t(group) << (kScales * kFormatBits);
    for (int a = 0; a < kScales; ++a) {
      table.data[a][t] = arrays[a].data;
      table.tag[t] |= uint32_t(arrays[a].format) << (a * kFormatBits);
    }
    table.data[kScales][t] = s.state[0].rest;
    table.data[kClock][t] = s.clock;
    table.place[t] = {s.first, s.row, s.number};
    table.add(s.size, chunk);
  }
}

}  // namespace amp_mp::cuda
