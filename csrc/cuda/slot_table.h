#pragma once
// How a kernel reads the slots of an apply or update_sums pass.
#include "cuda/access.h"
#include "cuda/step_table.h"

namespace amp_mp::cuda {

// The formats that a rule's state number K may be stored in.
template <class Rule, int K>
constexpr FormatSet kFormatsOfState =
    has_direction<Rule> && K == state_count<Rule> - 1 ? just(Format::bfloat16)
    : is_square<Rule, K>                              ? kSquareFormats
    : is_moment(Rule::kKept.of[K].kind)               ? formats_with(kForMoment)
                                                      : just(Format::float32);

// Whether the kernels are compiled for the formats of a slot's states.
template <class Rule>
bool is_compiled(const Slot& s) {
  const auto is = [](bool has, FormatSet formats, const Array& state) {
    return !has || is_in(formats, state.format);
  };
  return is(state_count<Rule> > 0, kFormatsOfState<Rule, 0>, s.state[0]) &&
         is(state_count<Rule> > 1, kFormatsOfState<Rule, 1>, s.state[1]) &&
         is(state_count<Rule> > 2, kFormatsOfState<Rule, 2>, s.state[2]);
}

template <class Rule>
constexpr int kArrays = kState0 + state_count<Rule>;

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

// 0, which the compiler cannot know. A slot that is reached through it is read anew; otherwise what
// was read before stays in registers, and kernels spill.
__device__ __forceinline__ int unknown_zero() {
  int zero = 0;
  asm volatile("" : "+r"(zero));
  return zero;
}

// One slot in a kernel. `Layout` has the formats that are known when compiling (cuda/layouts.h).
template <class Rule, uint32_t Layout = kAnyTag>
struct View {
  Array grad, master, copy, state[kMaxStates] = {};
  const SlotEntry& entry;
  const SlotRule<Rule>& slot_rule;
  bool wide = true;  // every array starts at a multiple of 16 bytes
  bool has_copy;

  __device__ __forceinline__ View(const SlotEntry& e, const SlotRule<Rule>& slot_rule)
      : entry(e), slot_rule(slot_rule) {
    const uint32_t tag = e.tag;
    const auto array = [&](int number, void* data, void* second) {
      wide = wide && is_wide(data);  // a missing array is wide
      return Array{to_global(data), format_in<Layout>(tag, number), to_global(second)};
    };
    grad = array(kGrad, slot_rule.grad, nullptr);
    master = array(kMaster, e.master, e.second);
    copy = array(kSecond, e.second, nullptr);
    if constexpr (state_count<Rule> > 0) state[0] = array(kState0, e.state0, e.scales0);
    if constexpr (state_count<Rule> > 1) state[1] = array(kState0 + 1, e.state1, e.scales1);
    if constexpr (state_count<Rule> > 2) state[2] = array(kState0 + 2, e.state2, nullptr);
    static_assert(Rule::kKept.of[2].kind == Kind::exact,
                  "a SlotEntry has no scales for state 2, and draws() does not ask for it: a rule "
                  "declares moments and squares before what is exact");
    has_copy = !is_split(master.format) && e.second;
  }

  // The same slot. Where any format may be in it there is more to keep than registers.
  __device__ __forceinline__ View again() const {
    const int zero = Layout == kAnyTag ? unknown_zero() : 0;
    return View((&entry)[zero], (&slot_rule)[zero]);
  }

  __device__ __forceinline__ bool draws() const {
    return is_stochastic(state[0].format) || is_stochastic(state[1].format);
  }
  __device__ __forceinline__ Changes changes() const {
    return {static_cast<uint64_t*>(to_global(entry.changes)),
            entry.tag & kComparedAsFloat16 ? Format::float16 : Format::bfloat16};
  }
  __device__ __forceinline__ bool draws_weights() const { return is_stochastic(master.format); }
  __device__ __forceinline__ Randomness randomness() const {
    return {random_stream(slot_rule.seed, slot_rule.step, entry.tensor_index, false), entry.first,
            entry.rows.length > 0 ? &entry.rows : nullptr};
  }
};

}  // namespace amp_mp::cuda
