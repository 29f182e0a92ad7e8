// One read-modify-write of everything a step touches. A kernel per rule; formats are a tag of the
// slot, the same for a whole block of threads.
#include "cuda/packs.h"
#include "cuda/passes.h"
#include "cuda/table.h"

namespace amp_mp::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 16384;  // elements a block of threads owns; a multiple of kPack * kThreads
constexpr int kMaxGroups = 8;  // param_groups of one launch

struct Hypers {
  Hyper group[kMaxGroups];
};

enum Array { kGrad, kWeight, kMaster, kState0, kState1, kClock, kArrays };

using ApplyTable = Table<kArrays, int(sizeof(Hypers))>;

// A slot's formats, four bits an array, and then its group.
constexpr int kFormatBits = 4;

__device__ __forceinline__ int group_of(uint32_t tag) { return int(tag >> (kClock * kFormatBits)); }

__device__ __forceinline__ Format format_of(uint32_t tag, int array) {
  return Format(tag >> (array * kFormatBits) & ((1 << kFormatBits) - 1));
}

template <class Rule>
__global__ void __launch_bounds__(kThreads)
    tick_kernel(const ApplyTable __grid_constant__ table, const Hypers __grid_constant__ hypers,
                const Verdict* __restrict__ verdict, Rule* __restrict__ rules) {
  if (verdict->found_inf != 0) return;
  for (int t = threadIdx.x; t < table.count; t += kThreads) {
    const Hyper& hyper = hypers.group[group_of(table.tag[t])];
    Clock* clock = static_cast<Clock*>(table.data[kClock][t]);
    clock->tick(hyper);
    rules[table.first_index + t] = Rule::at(hyper, *clock);
  }
}

// Two blocks an SM: with launch bounds of 256 alone ptxas aims at 32 registers and splits the
// loads.
template <class Rule>
__global__ void __launch_bounds__(kThreads, 2)
    apply_kernel(const ApplyTable __grid_constant__ table, const Hypers __grid_constant__ hypers,
                 const Verdict* __restrict__ verdict, const Rule* __restrict__ rules) {
  if (verdict->found_inf != 0) return;
  const Chunk chunk = find_chunk(table, kChunk);
  const uint32_t tag = table.tag[chunk.slot];
  const Rule rule = rules[table.first_index + chunk.slot];
  const bool negate = hypers.group[group_of(tag)].maximize;
  const float multiplier = float(negate ? -verdict->multiplier : verdict->multiplier);

  Span array[kClock];
  bool wide = true;
  for (int a = 0; a < kClock; ++a) {
    array[a] = {table.data[a][chunk.slot], format_of(tag, a)};
    wide = wide && is_wide(array[a].data);  // a missing array is wide
  }

  auto update = [&](int64_t at, int n,
                    bool whole) {  // inlined twice: with 16-byte pieces and without
    float g[kPack], w[kPack] = {}, s0[kPack] = {}, s1[kPack] = {};
    load(g, array[kGrad], at, n, whole);
    load(w, array[kMaster], at, n, whole);
    if constexpr (Rule::kStates > 0) load(s0, array[kState0], at, n, whole);
    if constexpr (Rule::kStates > 1) load(s1, array[kState1], at, n, whole);
    for (int k = 0; k < kPack; ++k) {
      if constexpr (Rule::kStates == 0) rule(g[k] * multiplier, w[k]);
      if constexpr (Rule::kStates == 1) rule(g[k] * multiplier, w[k], s0[k]);
      if constexpr (Rule::kStates == 2) rule(g[k] * multiplier, w[k], s0[k], s1[k]);
    }
    store_history(array[kMaster], w, at, n, whole);
    if constexpr (Rule::kStates > 0) store_history(array[kState0], s0, at, n, whole);
    if constexpr (Rule::kStates > 1) store_history(array[kState1], s1, at, n, whole);
    if (array[kWeight].data) store_history(array[kWeight], w, at, n, whole);
  };
  for (int i = threadIdx.x * kPack; i < chunk.size; i += kThreads * kPack) {
    const int n = chunk.size - i < kPack ? chunk.size - i : kPack;
    if (wide && n == kPack) {
      update(chunk.begin + i, kPack, true);
    } else {
      update(chunk.begin + i, n, false);
    }
  }
}

}  // namespace

template <class Rule>
const char* apply(const Slot* slots, int64_t count, const Hyper* hypers, const Verdict* verdict,
                  Rule* rules, void* stream) {
  static thread_local ApplyTable table;
  const auto queue = static_cast<cudaStream_t>(stream);
  for (int64_t i = 0; i < count;) {
    table.begin(i, 0);
    const int first_group = slots[i].group;  // slots come in the order of their groups
    Hypers local = {};
    for (; i < count && !table.full() && slots[i].group - first_group < kMaxGroups; ++i) {
      const Slot& s = slots[i];
      const int t = table.count, group = s.group - first_group;
      local.group[group] = hypers[s.group];
      const Span arrays[kClock] = {s.grad, s.weight, s.master, s.state[0], s.state[1]};
      table.tag[t] = uint32_t(group) << (kClock * kFormatBits);
      for (int a = 0; a < kClock; ++a) {
        table.data[a][t] = arrays[a].data;
        table.tag[t] |= uint32_t(arrays[a].format) << (a * kFormatBits);
      }
      table.data[kClock][t] = s.clock;
      table.add(s.size, kChunk);
    }
    const char* error =
        message(launch(tick_kernel<Rule>, 1, kThreads, queue, table, local, verdict, rules));
    if (!error && table.blocks() > 0)
      error = message(launch(apply_kernel<Rule>, table.blocks(), kThreads, queue, table, local,
                             verdict, static_cast<const Rule*>(rules)));
    if (error) return error;
  }
  return nullptr;
}

#define AMP_MP_INSTANTIATE(Rule, op)                                                          \
  template const char* apply<Rule>(const Slot*, int64_t, const Hyper*, const Verdict*, Rule*, \
                                   void*);
AMP_MP_FOR_EACH_RULE(AMP_MP_INSTANTIATE)

}  // namespace amp_mp::cuda
