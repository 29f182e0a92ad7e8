#pragma once
// How a kernel reads the slots of an apply or moments pass.
#include "cuda/access.h"
#include "cuda/step_table.h"

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

__device__ __forceinline__ Format format_of(uint32_t tag, int array) {
  return Format(tag >> (array * kFormatBits) & ((1 << kFormatBits) - 1));
}

// One slot in a kernel.
template <class Rule>
struct View {
  Array grad, master, copy, state[kMaxStates] = {};
  const StepList& table;
  const SlotRule<Rule>* slot_rules;
  int slot;   // index in both
  bool wide;  // every array starts at a multiple of 16 bytes
  bool has_copy;

  __device__ __forceinline__ View(const StepList& table, const SlotRule<Rule>* slot_rules, int slot)
      : table(table), slot_rules(slot_rules), slot(slot), wide(true) {
    const SlotEntry& e = table.entries[slot];
    const uint32_t tag = e.tag;
    const auto array = [&](int number, void* data, void* rest) {
      wide = wide && is_wide(data);  // a missing array is wide
      return Array{to_global(data), format_of(tag, number), to_global(rest)};
    };
    grad = array(kGrad, slot_rule().grad, nullptr);
    master = array(kMaster, e.master, e.second);
    copy = array(kSecond, e.second, nullptr);
    if constexpr (Rule::kStates > 0) state[0] = array(kState0, e.state0, e.scales0);
    if constexpr (Rule::kStates > 1) state[1] = array(kState0 + 1, e.state1, e.scales1);
    if constexpr (Rule::kStates > 2) state[2] = array(kState0 + 2, e.state2, nullptr);
    has_copy = !is_split(master.format) && e.second;
  }

  __device__ __forceinline__ bool draws() const {
    return is_stochastic(state[0].format) || is_stochastic(state[1].format);
  }
  __device__ __forceinline__ const SlotRule<Rule>& slot_rule() const { return slot_rules[slot]; }
  __device__ __forceinline__ uint64_t random(bool of_weights, int64_t at) const {
    View own = *this;
    asm volatile("" : "+r"(own.slot));  // or all these numbers stay in registers, and kernels spill
    const SlotEntry& e = own.table.entries[own.slot];
    const SlotRule<Rule>& rule = own.slot_rule();
    return random_bytes(random_stream(rule.seed, rule.step, e.tensor_index, of_weights), e.first,
                        e.rows, at);
  }
};

}  // namespace amp_mp::cuda
