#pragma once
// The formats that the apply kernel is compiled for besides the one way that takes any: those of
// the `memory` settings of the common optimizers. A list goes once the list "one" of benchmarks/gpu
// takes less than 1.03 times as long without it, in each of its formats.
//
// A slot's tag has five bits for the format of each array, and one that says how its weights are
// compared. A layout is a tag, in which the digit kAnyDigit leaves a format open.
#include <type_traits>

#include "cuda/gpu.h"
#include "plan.h"

namespace amp_mp {
// Declared alone: a unit has the rules of its own family.
struct Adam;
struct AdamW;
struct Lion;
struct PlainRMSprop;
struct RMSprop;
struct SGD;
}  // namespace amp_mp

namespace amp_mp::cuda {

// Index of a slot's arrays in its tag. kSecond is the second array of a master, or the copy to
// write of a float32 weight; a slot never has both.
enum SlotArray { kGrad, kSecond, kMaster, kState0 };

constexpr int kFormatBits = 5;
constexpr uint32_t kAnyDigit = (1u << kFormatBits) - 1;
constexpr uint32_t kAnyTag = ~0u;
constexpr uint32_t kComparedAsFloat16 = 1u << 30;
static_assert(kFormatCount <= int(kAnyDigit) && (kState0 + kMaxStates) * kFormatBits <= 30);

__device__ __forceinline__ constexpr Format format_of(uint32_t tag, int array) {
  return Format(tag >> (array * kFormatBits) & kAnyDigit);
}

// The formats of a tag that a layout knows are constants, so that code for other formats goes away.
template <uint32_t Layout>
__device__ __forceinline__ constexpr Format format_in(uint32_t tag, int array) {
  const Format known = format_of(Layout, array);
  return known == Format(kAnyDigit) ? format_of(tag, array) : known;
}

// A layout with gradients of any format. An array that is missing has the digit of float32, and
// kSecond too where it is a master's, whose format says its own.
constexpr uint32_t layout_of(Format master, Format state0 = Format::float32,
                             Format state1 = Format::float32) {
  const bool may_have_copy = master == Format::float32;
  return kAnyDigit << (kGrad * kFormatBits) |
         (may_have_copy ? kAnyDigit : 0u) << (kSecond * kFormatBits) |
         uint32_t(master) << (kMaster * kFormatBits) | uint32_t(state0) << (kState0 * kFormatBits) |
         uint32_t(state1) << ((kState0 + 1) * kFormatBits);
}
static_assert(uint32_t(Format::float32) == 0);

// Whether a layout is that of a slot of a rule with so many arrays.
__device__ __forceinline__ constexpr bool is_layout(uint32_t layout, uint32_t tag, int arrays) {
  bool is = true;
  for (int a = 0; a < arrays; ++a)
    is = is &&
         (format_of(layout, a) == Format(kAnyDigit) || format_of(layout, a) == format_of(tag, a));
  return is;
}

template <uint32_t... Layouts>
struct LayoutList {};

// The layouts of a rule. Each takes as much code as all others together have besides, so they are
// for rules that many people use.
template <class Rule>
struct LayoutsOf {
  using type = LayoutList<>;
};

// memory="float32", "exact", "lean" and "tiny" of a rule whose state 0 is a moment.
struct PresetsOfMoment {
  using type = LayoutList<layout_of(Format::float32), layout_of(Format::bfloat16_split32),
                          layout_of(Format::bfloat16_split24, Format::bfloat16_stochastic),
                          layout_of(Format::bfloat16_split24, Format::m8)>;
};
template <>
struct LayoutsOf<SGD> : PresetsOfMoment {};
template <>
struct LayoutsOf<Lion> : PresetsOfMoment {};

// The same of a rule with a mean of squares in state 1.
struct PresetsOfMoments {
  using type =
      LayoutList<layout_of(Format::float32), layout_of(Format::bfloat16_split32),
                 layout_of(Format::bfloat16_split24, Format::bfloat16_stochastic, Format::ue8m8),
                 layout_of(Format::bfloat16_split24, Format::m8, Format::ue8m8),
                 layout_of(Format::bfloat16_split24, Format::m8, Format::log8),
                 layout_of(Format::bfloat16_split20, Format::m8, Format::log8)>;
};
template <>
struct LayoutsOf<Adam> : PresetsOfMoments {};
template <>
struct LayoutsOf<AdamW> : PresetsOfMoments {};
template <>
struct LayoutsOf<RMSprop> : PresetsOfMoments {};

// memory="tiny" stores a mean of squares that is the only state as "lean" does.
template <>
struct LayoutsOf<PlainRMSprop> {
  using type = LayoutList<layout_of(Format::float32), layout_of(Format::bfloat16_split32),
                          layout_of(Format::bfloat16_split24, Format::ue8m8),
                          layout_of(Format::bfloat16_split24, Format::log8)>;
};

// Those of a step that notes changes: weights that samplers are sent train with AdamW, and the
// others' loops would be half of what compiling takes.
template <class Rule>
using NotingLayoutsOf =
    std::conditional_t<std::is_same_v<Rule, AdamW>, typename LayoutsOf<Rule>::type, LayoutList<>>;

}  // namespace amp_mp::cuda
