#pragma once
// Formats of groups: kGroup neighbours share a scale, which is the second array. A format says how
// by a struct with these members; numbers and constants are bits, so that loops over any of them
// are the same.
//
//   Code, Scale       the elements of the two arrays
//   size(x)           what the largest of is taken to find the scale
//   scale(largest)    the scale, as a number, and `load` and `store` to and from Scale
//   is_plain(scale)   whether `decode` is right; else all codes are 0, whatever the kind of NaN, and
//                     all elements are `special(scale)`
//   base, decode      a constant of the group, and an element by it
//   offset, round     a constant of the group, and an element by it: byte 1 of the result is the
//   code
//
// All codes of a group that is not plain are stored as 0: the bits of a NaN depend on the processor
// and on the order of a sum's operands, and a code would too.
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
struct GroupWith<Log8> {
  using type = Log8Group;
};
template <class Code>
using GroupOf = typename GroupWith<Code>::type;

}  // namespace amp_mp
