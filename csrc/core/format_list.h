#pragma once
// The list of formats: how an array of numbers may be stored, and which arrays may be stored so.
// Everything that depends on the set of formats is derived from it. A new format is a line in the
// list, its `decode` and `encode` in core/formats.h and two lines in cuda/convert.h; one of groups
// is a line in the list and a struct as core/groups.h says, a split master one and a struct of
// core/splits.h (docs/adding_things.md).
#include <cstdint>

#include "core/macros.h"

namespace amp_mp {

// Elements of arrays. float16_root is the square root of a number that is not negative: Adam's
// second moment is often below float16's range, its root is not. ue8m8 is a bfloat16 without sign,
// with one more bit of mantissa. M8, I8 and Log8 are codes whose scale is shared by a group
// (core/m8.h, core/i8.h, core/log8.h).
struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};
struct float16_root {
  float16 root;
};
struct ue8m8 {
  uint16_t bits;
};
struct M8 {
  int8_t code;
};
struct I8 {
  int8_t code;
};
struct Log8 {
  uint8_t code;
};
// Elements of second arrays besides plain numbers: none, and the remainders of two neighbours.
struct NoSecond {};
struct TwoNibbles {
  uint8_t bits;  // the first neighbour's are the low half
};

constexpr int kGroup = 32;  // elements that share a scale in formats of groups (core/groups.h)
constexpr int kPacked = 2;  // elements that share a byte of TwoNibbles

// Properties of a format.
enum FormatProperty : uint32_t {
  // Arrays that may be stored in it. Master includes a weight that is its own master.
  kForGrad = 1,
  kForMaster = 2,
  kForMoment = 4,  // first moments and momentum buffers
  kForSquare = 8,  // means and sums of squares
  kRandom = 16,    // storing draws random bits
  kSplit = 32,     // two arrays, one of them the low-precision weight (core/splits.h)
  kGrouped = 64,   // the second array has one scale for each group of kGroup elements
  kForState = kForMoment | kForSquare,
  kForAll = kForGrad | kForMaster | kForState,
};

// Name in Python; element of the data array; torch's dtype for it; element of the second array
// (plan.h, Array), which is an integer, a bfloat16, a float16, TwoNibbles or NoSecond; properties.
// clang-format off
#define AMP_MP_FOR_EACH_FORMAT(X)                                                              \
  X(float32,             float,        Float,    NoSecond,   kForAll)                          \
  X(float16,             float16,      Half,     NoSecond,   kForAll)                          \
  X(bfloat16,            bfloat16,     BFloat16, NoSecond,   kForAll)                          \
  X(float16_root,        float16_root, Half,     NoSecond,   kForSquare)                       \
  X(float16_stochastic,  float16,      Half,     NoSecond,   kForMaster | kRandom)             \
  X(bfloat16_stochastic, bfloat16,     BFloat16, NoSecond,   kForMaster | kForState | kRandom) \
  X(ue8m8,               ue8m8,        Short,    NoSecond,   kForSquare | kRandom)             \
  X(m8,                  M8,           Char,     bfloat16,   kForMoment | kGrouped | kRandom)  \
  X(i8,                  I8,           Char,     bfloat16,   kForMoment | kGrouped | kRandom)  \
  X(log8,                Log8,         Byte,     uint8_t,    kForSquare | kGrouped | kRandom)  \
  X(bfloat16_float32,    float,        Float,    bfloat16,   kForMaster | kSplit)              \
  X(float16_float32,     float,        Float,    float16,    kForMaster | kSplit)              \
  X(bfloat16_split32,    bfloat16,     BFloat16, int16_t,    kForMaster | kSplit)              \
  X(bfloat16_split24,    bfloat16,     BFloat16, int8_t,     kForMaster | kSplit)              \
  X(bfloat16_split20,    bfloat16,     BFloat16, TwoNibbles, kForMaster | kSplit | kRandom)    \
  X(float16_split32,     float16,      Half,     int16_t,    kForMaster | kSplit)              \
  X(float16_split24,     float16,      Half,     int8_t,     kForMaster | kSplit)
// clang-format on

#define AMP_MP_FORMAT(name, ...) name,
enum class Format : uint8_t { AMP_MP_FOR_EACH_FORMAT(AMP_MP_FORMAT) };
#undef AMP_MP_FORMAT

template <class T>
constexpr int kWidth = int(sizeof(T));  // bytes of an element
template <>
inline constexpr int kWidth<NoSecond> = 0;
template <class T>
constexpr int kPackedIn = 1;
template <>
inline constexpr int kPackedIn<TwoNibbles> = kPacked;

struct FormatInfo {
  const char* name;
  int width, second_width;  // bytes of an element of each array, 0 without the second
  int group;                // how many elements share one of the second array
  uint32_t properties;

  constexpr bool is(uint32_t property) const { return (properties & property) != 0; }
};

#define AMP_MP_FORMAT(name, element, dtype, second, properties) \
  {#name, kWidth<element>, kWidth<second>,                      \
   ((properties) & kGrouped) != 0 ? kGroup : kPackedIn<second>, properties},
constexpr FormatInfo kFormats[] = {AMP_MP_FOR_EACH_FORMAT(AMP_MP_FORMAT)};
#undef AMP_MP_FORMAT
#define AMP_MP_FORMAT(name, ...) #name,
constexpr const char* kFormatNames[] = {AMP_MP_FOR_EACH_FORMAT(AMP_MP_FORMAT)};
#undef AMP_MP_FORMAT
constexpr int kFormatCount = sizeof kFormats / sizeof *kFormats;

// The element types of a format known when compiling.
template <Format F>
struct Elements;
#define AMP_MP_FORMAT(name, element, dtype, second, properties) \
  template <>                                                   \
  struct Elements<Format::name> {                               \
    using Data = element;                                       \
    using Second = second;                                      \
  };
AMP_MP_FOR_EACH_FORMAT(AMP_MP_FORMAT)
#undef AMP_MP_FORMAT

// Sets of formats are bit masks, because kernels cannot index kFormats.
using FormatSet = uint32_t;
static_assert(kFormatCount <= 32);

template <class F>
constexpr FormatSet formats_where(const F& holds) {
  FormatSet set = 0;
  for (int f = 0; f < kFormatCount; ++f)
    if (holds(kFormats[f])) set |= 1u << f;
  return set;
}

AMP_MP_BOTH constexpr FormatSet just(Format f) { return 1u << int(f); }

// The formats that have at least one of the properties.
constexpr FormatSet formats_with(uint32_t properties) {
  return formats_where([=](const FormatInfo& f) { return f.is(properties); });
}

AMP_MP_BOTH constexpr bool is_in(FormatSet set, Format f) { return (set >> int(f) & 1u) != 0; }

constexpr FormatSet kAnyFormat = formats_where([](const FormatInfo&) { return true; });
constexpr FormatSet kGradFormats = formats_with(kForGrad);
constexpr FormatSet kMasterFormats = formats_with(kForMaster);
constexpr FormatSet kSquareFormats = formats_with(kForSquare);
constexpr FormatSet kStateFormats = formats_with(kForState);
constexpr FormatSet kRandomFormats = formats_with(kRandom), kSplitFormats = formats_with(kSplit);
constexpr FormatSet kGroupedFormats = formats_with(kGrouped);
constexpr FormatSet kWidth1 = formats_where([](const FormatInfo& f) { return f.width == 1; });
constexpr FormatSet kWidth4 = formats_where([](const FormatInfo& f) { return f.width == 4; });
constexpr FormatSet kPackedFormats =
    formats_where([](const FormatInfo& f) { return f.group == kPacked; });
constexpr FormatSet kSecond1 = formats_where(
    [](const FormatInfo& f) { return f.is(kSplit) && f.second_width == 1 && f.group == 1; });

// Whether storing draws random bits.
AMP_MP_BOTH bool is_stochastic(Format f) { return is_in(kRandomFormats, f); }

AMP_MP_BOTH bool is_split(Format f) { return is_in(kSplitFormats, f); }

// Whether the remainders of two neighbours share a byte.
AMP_MP_BOTH bool is_packed(Format f) { return is_in(kPackedFormats, f); }

// Whether stores of weights and moments must be saturated first; formats that always saturate do it
// in `encode`.
AMP_MP_BOTH bool saturates(Format f) { return f == Format::float16; }

// Bytes of an element of data, and of the second array of a split format that has one for each
// element of data; else 0.
AMP_MP_BOTH int width_of(Format f) { return is_in(kWidth4, f) ? 4 : is_in(kWidth1, f) ? 1 : 2; }
AMP_MP_BOTH int second_width_of(Format f) {
  return !is_split(f) || is_packed(f) ? 0 : is_in(kSecond1, f) ? 1 : 2;
}

}  // namespace amp_mp
