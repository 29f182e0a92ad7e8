#pragma once
// The loop of the apply pass, which apply.cu compiles.
#include <type_traits>

#include "cuda/changes.h"
#include "cuda/passes.h"
#include "cuda/quotient.h"
#include "cuda/slot_table.h"
#include "cuda/step_report.h"

namespace amp_mp::cuda {
namespace {

constexpr int kThreads = 128;

// Updates eight elements.
template <class Rule, class... States>
__device__ __forceinline__ void update(const Rule& rule, float multiplier, const float (&g)[kPack],
                                       float (&w)[kPack], States (&... states)[kPack]) {
  if constexpr (divides_by_root<Rule>) {
    Fraction fraction[kPack];
    float quotient[kPack];
    for (int k = 0; k < kPack; ++k)
      fraction[k] = rule.moments(g[k] * multiplier, w[k], states[k]...);
    divide_all(rule.divide, fraction, quotient);
    for (int k = 0; k < kPack; ++k) rule.take(quotient[k], w[k], states[k]...);
  } else {
    for (int k = 0; k < kPack; ++k) rule(g[k] * multiplier, w[k], states[k]...);
  }
}

// What takes the place of the gradient: the update that was made of the directions, if there is
// one.
template <class Rule>
constexpr FormatSet kSourceFormats = has_direction<Rule> ? just(Format::bfloat16) : kGradFormats;
template <class Rule, uint32_t Layout>
__device__ __forceinline__ const Array& source_of(const View<Rule, Layout>& slot) {
  if constexpr (has_direction<Rule>) return slot.state[state_count<Rule> - 1];
  return slot.grad;
}

// Eight elements of every array that apply reads: as they are stored, then as float32. Those that a
// rule does not have leave no trace.
template <class Rule>
struct Eight {
  // `directions` has stored those of a rule that has one.
  static constexpr int kStates = has_direction<Rule> ? 0 : state_count<Rule>;
  Held<kSourceFormats<Rule>> grad;
  Held<kMasterFormats> master;
  Held<kFormatsOfState<Rule, 0>> first;
  Held<kFormatsOfState<Rule, 1>> second;
  Held<kFormatsOfState<Rule, 2>> third;
  float g[kPack], w[kPack], s0[kPack], s1[kPack], s2[kPack];

  template <class Slot>
  __device__ __forceinline__ void read(const Slot& from, int64_t at, int n, bool whole) {
    const auto all = [&](bool at_once) {
      grad.read(source_of(from), at, n, at_once);
      master.read(from.master, at, n, at_once);
      if constexpr (kStates > 0) first.read(from.state[0], at, n, at_once);
      if constexpr (kStates > 1) second.read(from.state[1], at, n, at_once);
      if constexpr (kStates > 2) third.read(from.state[2], at, n, at_once);
    };
    if (whole) {  // one branch for all arrays, or each array's loads wait for those before
      all(true);
    } else {
      all(false);
    }
  }

  template <class Slot>
  __device__ __forceinline__ void decode(const Slot& from) {
    grad.decode(source_of(from).format, g);
    master.decode(from.master.format, w);
    if constexpr (kStates > 0) first.decode(from.state[0].format, s0);
    if constexpr (kStates > 1) second.decode(from.state[1].format, s1);
    if constexpr (kStates > 2) third.decode(from.state[2].format, s2);
  }

  __device__ __forceinline__ void step(const Rule& rule, float multiplier) {
    if constexpr (has_direction<Rule>) update(rule.step, multiplier, g, w);
    if constexpr (kStates == 0 && !has_direction<Rule>) update(rule, multiplier, g, w);
    if constexpr (kStates == 1) update(rule, multiplier, g, w, s0);
    if constexpr (kStates == 2) update(rule, multiplier, g, w, s0, s1);
    if constexpr (kStates == 3) update(rule, multiplier, g, w, s0, s1, s2);
  }

  // Returns the master as it is stored.
  template <class Slot>
  __device__ __forceinline__ Held<kMasterFormats> store_weights(const Slot& to,
                                                                const Randomness& bytes, int64_t at,
                                                                int n, bool whole) {
    const auto stored = store_history<kMasterFormats>(
        to.master, w, at, n, whole, to.draws_weights() ? bytes.eight(true, at) : 0);
    if (to.has_copy) store_history<kGradFormats>(to.copy, w, at, n, whole);
    return stored;
  }

  template <class Slot>
  __device__ __forceinline__ void store_states(const Slot& to, const Randomness& bytes, int64_t at,
                                               int n, bool whole) {
    if constexpr (!needs_update_norm<Rule>) {  // the update_sums pass has stored them
      [[maybe_unused]] const uint64_t random =
          kStates > 0 && to.draws() ? bytes.eight(false, at) : 0;
      if constexpr (kStates > 0)
        store_history<kFormatsOfState<Rule, 0>>(to.state[0], s0, at, n, whole, random);
      if constexpr (kStates > 1)
        store_history<kFormatsOfState<Rule, 1>>(to.state[1], s1, at, n, whole, random);
      if constexpr (kStates > 2)
        store_history<kFormatsOfState<Rule, 2>>(to.state[2], s2, at, n, whole, random);
    }
  }
};

// Whether the numbers of the weights, which noting compares, stay at hand: where the layout's
// weight is the first array of a split. Else they are read once more, before the first store and
// behind the last, because registers are scarce.
template <uint32_t Layout>
constexpr bool kKeepsNumbers = Layout != kAnyTag && format_of(Layout, kMaster) != Format::float32;

template <uint32_t Layout, class Slot>
__device__ __forceinline__ Numbers numbers_of(const Slot& slot, const Held<kMasterFormats>& master,
                                              int64_t at, int n, bool whole) {
  if constexpr (kKeepsNumbers<Layout>) return Numbers::of(master.data, n);
  return Numbers::read(slot.master, slot.changes().format, at, n, whole);
}

// kNotes: changes of weights are noted where a slot wants it. Without it there is no trace of that.
template <class Rule, uint32_t Layout, bool kNotes>
__device__ __forceinline__ void apply_chunk(const SlotEntry* entries, const Chunk& chunk,
                                            const SlotRule<Rule>* slot_rules) {
  const int index = chunk.slot + unknown_zero();
  const SlotRule<Rule>& slot_rule = slot_rules[index];
  const View<Rule, Layout> slot(entries[index], slot_rule);
  const Randomness randomness = slot.randomness();
  const Rule rule = slot_rule.rule;
  const float multiplier = has_direction<Rule> ? 1.0f : slot_rule.multiplier;
  [[maybe_unused]] uint32_t added = 0;  // to the sum of the weights

  // `all`, std::true_type: all threads have eight elements, at aligned addresses.
  const auto update_eight = [&](auto all, int64_t begin, int left) {
    constexpr bool kAll = decltype(all)::value;
    const int i = int(threadIdx.x) * kPack, n = kAll ? kPack : left - i;
    const int64_t at = begin + i;
    const View<Rule, Layout> from = slot.again();
    const bool whole = kAll || (has_eight(n) && from.wide);
    Eight<Rule> own;
    own.read(from, at, n, whole);
    own.decode(from);
    own.step(rule, multiplier);
    const View<Rule, Layout> to = slot.again();
    const Randomness bytes = Layout == kAnyTag ? to.randomness() : randomness;
    [[maybe_unused]] const bool notes = kNotes && to.entry.changes;
    [[maybe_unused]] Numbers before = {};
    if constexpr (kNotes)
      if (kKeepsNumbers<Layout> || notes) before = numbers_of<Layout>(to, own.master, at, n, whole);
    [[maybe_unused]] const auto stored = own.store_weights(to, bytes, at, n, whole);
    own.store_states(to, bytes, at, n, whole);
    if constexpr (kNotes)
      if (notes)
        added +=
            compare(before, numbers_of<Layout>(to, stored, at, n, whole), to.changes().bits(), at);
  };
  // Every thread runs the same number of iterations, because groups exchange numbers between
  // threads.
  int64_t begin = chunk.begin;
  for (int left = chunk.size; left > 0; left -= kThreads * kPack, begin += kThreads * kPack) {
    if (Layout != kAnyTag && slot.wide && left >= kThreads * kPack) {
      update_eight(std::true_type{}, begin, left);
    } else {
      update_eight(std::false_type{}, begin, left);
    }
  }
  if constexpr (kNotes)
    if (slot.entry.changes) add_to_sum(slot.changes().sum, added);
}

// Calls apply_chunk with the first layout that is the slot's, or else with none.
template <class Rule, bool kNotes>
__device__ __forceinline__ void apply_as(LayoutList<>, uint32_t, const SlotEntry* entries,
                                         const Chunk& chunk, const SlotRule<Rule>* slot_rules) {
  apply_chunk<Rule, kAnyTag, kNotes>(entries, chunk, slot_rules);
}
template <class Rule, bool kNotes, uint32_t Layout, uint32_t... Others>
__device__ __forceinline__ void apply_as(LayoutList<Layout, Others...>, uint32_t tag,
                                         const SlotEntry* entries, const Chunk& chunk,
                                         const SlotRule<Rule>* slot_rules) {
  if (is_layout(Layout, tag, kArrays<Rule>))
    return apply_chunk<Rule, Layout, kNotes>(entries, chunk, slot_rules);
  apply_as<Rule, kNotes>(LayoutList<Others...>{}, tag, entries, chunk, slot_rules);
}

// What an apply kernel does. A slot's formats are a tag, the same for a whole block of threads; for
// common tags the loop is compiled with the formats known.
template <class Rule, bool kNotes, class Layouts>
__device__ __forceinline__ void apply_block(const StepList& table, const Verdict* verdict,
                                            const SlotRule<Rule>* slot_rules,
                                            const StepReportBuffer& report) {
  if (int(blockIdx.x) < table.first_block) {
    if (threadIdx.x == 0) write_report(report, *verdict, report.counts->next_scale);
    return;
  }
  const double skip = verdict->skip;  // arrives while the chunk is looked for
  const Chunk chunk = find_chunk(table);
  if (skip != 0) return;
  apply_as<Rule, kNotes>(Layouts{}, table.entries[chunk.slot].tag, table.entries, chunk,
                         slot_rules);
}

}  // namespace

}  // namespace amp_mp::cuda
