#pragma once
// What decide_step has as arguments of the slots of a step, in three sizes. A short plan is there
// as a whole. Of a longer one there is what changes in every step: learning rates and gradients, if
// there is room. The rest is in the memory of StepTable.
#include "cuda/step_table.h"

namespace amp_mp::cuda {

// What decide_step has to know of a slot.
struct StepInput {
  int slot, row, group;  // slot of SlotRule, row of NormInputs
  Clock* clock;
};

struct ShortPlan {
  static constexpr int kGroups = 2, kAtOnce = 1;  // slots of a thread

  SlotEntry entry[kShortRows];
  Hyper hyper[kGroups];
  void* grad[kShortRows];
  Start start[kShortRows + 1];
  int32_t first_span[kShortRows + 1];
  int32_t count;
  SlotEntry* entries;  // where the table is to be
  Start *starts, *spans;

  __device__ __forceinline__ StepInput at(int t) const {
    const SlotEntry& e = entry[t];
    return {t, e.row, e.group, e.clock};
  }
  __device__ __forceinline__ Hyper hyper_of(int group) const { return hyper[group]; }
  __device__ __forceinline__ void* grad_of(int t) const { return grad[t]; }

  // Writes the table for apply and update_sums.
  __device__ __forceinline__ void write() const {
    const int t = int(threadIdx.x);
    if (t < count) entries[t] = entry[t];
    if (t > count) return;
    starts[t] = start[t];
    spans[t] = {first_span[t], start[t].slot};
  }

  void fill(const StepPlan& plan, const StepTable& table) {
    const TableLayout layout(table.rows, table.groups);
    const int first_group = plan.count > 0 ? plan.slots[0].group : 0;
    for (int g = 0; g < kGroups; ++g) hyper[g] = {};
    for (int64_t t = 0; t < plan.count; ++t) {
      entry[t] = entry_of(plan.slots[t]);
      entry[t].group -= first_group;
      hyper[entry[t].group] = plan.hypers[plan.slots[t].group];
      grad[t] = plan.slots[t].grad.data;
    }
    for_each_start(plan, plan.chunk,
                   [&](int64_t t, const Start& p) { start[t] = {p.first_chunk, int32_t(t)}; });
    for_each_start(plan, kSpan, [&](int64_t t, const Start& p) { first_span[t] = p.first_chunk; });
    count = int32_t(plan.count);
    entries = reinterpret_cast<SlotEntry*>(table.memory + layout.entries);
    starts = reinterpret_cast<Start*>(table.memory + layout.starts);
    spans = reinterpret_cast<Start*>(table.memory + layout.spans);
  }
};

template <int Words>
struct LongPlan {
  static constexpr int kAtOnce = 2;

  StepList list;
  const Hyper* hypers;
  void* const* grads;  // null: they are words, behind the rates
  int32_t count, rates;
  uint64_t word[Words];

  __device__ __forceinline__ StepInput at(int t) const {
    const int slot = list.starts[t].slot;
    const SlotEntry& e = list.entries[slot];
    return {slot, e.row, e.group, e.clock};
  }
  __device__ __forceinline__ Hyper hyper_of(int group) const {
    Hyper hyper = hypers[group];
    if (group < rates) memcpy(&hyper.lr, &word[group], sizeof hyper.lr);
    return hyper;
  }
  __device__ __forceinline__ void* grad_of(int t) const {
    return grads ? grads[t] : reinterpret_cast<void*>(word[rates + t]);
  }
  __device__ __forceinline__ void write() const {}

  void fill(const StepPlan& plan, const StepTable& table);
};

// Words of a LongPlan in a launch whose arguments have `limit` bytes.
constexpr int words_in(int limit) {
  constexpr size_t kOthers = 2 * sizeof(SpanSums) + sizeof(Criteria) + sizeof(NormInputs) + 40;
  return int((size_t(limit) - kOthers - sizeof(LongPlan<1>)) / 8);
}
constexpr int kFewWords = words_in(4096), kManyWords = words_in(kArgumentLimit);

inline bool rates_travel(int64_t groups) { return groups <= kManyWords; }
inline bool grads_travel(int64_t groups, int64_t count) { return groups + count <= kManyWords; }

template <int Words>
void LongPlan<Words>::fill(const StepPlan& plan, const StepTable& table) {
  const TableLayout layout(table.rows, table.groups);
  list = list_of(plan, table, false);
  hypers = reinterpret_cast<const Hyper*>(table.memory + layout.hypers);
  grads = nullptr;
  count = int32_t(plan.count);
  rates = rates_travel(table.groups) ? int32_t(table.groups) : 0;
  for (int g = 0; g < rates; ++g) std::memcpy(&word[g], &plan.hypers[g].lr, sizeof(double));
  if (grads_travel(table.groups, plan.count)) {
    for (int64_t t = 0; t < plan.count; ++t)
      word[rates + t] = reinterpret_cast<uint64_t>(plan.slots[t].grad.data);
  } else {
    grads = reinterpret_cast<void* const*>(table.memory + layout.grads);
  }
}

}  // namespace amp_mp::cuda
