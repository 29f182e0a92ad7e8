#pragma once
// Formats of groups: kGroup neighbours share a scale, which is the second array. A format says how
// by a struct with these members; numbers and constants are bits, so that loops over any of them
// are the same.
//
//   Code, Scale       the elements of the two arrays
//   kSizeBits         the bits of a number that count for its group's scale
//   scale(largest)    the scale for the largest of these bits, and `load` and `store` to and from
//                     Scale
//   is_plain(scale)   whether `decode` is right; else all elements are `special(scale)`
//   base, decode      a constant of the group, and an element by it; `decode_top` takes the code as
//                     the top byte of a word
//   offset, round     a constant of the group, and an element by it: byte 1 of the result is the
//   code
//
// All codes of a group whose scale is not plain are stored as 0. The bits of a NaN depend on the
// processor, and a code of them would too.
#include "core/i8.h"
#include "core/log8.h"
#include "core/m8.h"

namespace amp_mp {

template <class Code>
struct GroupWith;
template <>
struct GroupWith<M8> {
  using type = M8Group;
};
template <>
struct GroupWith<I8> {
  using type = I8Group;
};
template <>
struct GroupWith<Log8> {
  using type = Log8Group;
};
template <class Code>
using GroupOf = typename GroupWith<Code>::type;

}  // namespace amp_mp
