#pragma once
// Note: One order of sums (docs/design.md)
//
// The order in which squares are summed. It is the same on every device, for every alignment and
// number of threads, so that the same gradients always give the same norm and the same clipping:
//
// - element e of a block of 4,096 is added to float lane e mod 64, in order;
//
// - the 64 lanes become doubles and one sum by a halving tree: lane[k] += lane[k + d], d = 32, 16,
//   and so on;
//
// - the 16 blocks of a span are added in index order, in double;
//
// - span s of a tensor is added to double lane s mod 256, and the lanes by the same tree;
//
// - the tensors of a call are added as the spans are.
//
// The two upper levels are 256 wide because a block of threads adds 256 numbers at once: adding the
// 15,259 spans of a tensor of 10^9 elements one after the other would take a GPU longer than
// reading the tensor.
//
// An update that is measured itself (UpdateSums) is added up in the same order, but in double from
// the first: where a matrix is split over processes its shards end elsewhere, and in double that
// leaves nothing in a float.
//
// A block of gradients with a non-finite element, or whose sum of squares is infinite or under
// 2^-100 (where float squares lose digits), is summed again in double over its finite elements.
#include <cstdint>

#include "core/macros.h"

namespace amp_mp {

constexpr int kLanes = 64;
constexpr int kBlock = 4096;
constexpr int kSpanBlocks = 16;
constexpr int64_t kSpan = int64_t(kBlock) * kSpanBlocks;
constexpr int kSumLanes = 256;
constexpr double kTinySquares = 0x1p-100;

// Statistics of a block, a span, a tensor or a list. All doubles: they are also the columns of the
// tensor that Python sees. Counts are exact up to 2^53.
struct Statistics {
  double sum_squares;  // of the finite elements
  double max_abs;      // largest finite |g|
  double non_finite;   // number of inf and NaN
};

// Sums over an update u and the weights w that it is for, of a block or a span. An element of which
// either is inf or NaN adds nothing.
struct UpdateSums {
  double update;  // u u
  double along;   // u w
  double weight;  // w w
};
constexpr int kUpdateSums = 3;  // its numbers; each has Statistics of its own in a list

// Whether a block has to be summed again in double.
AMP_MP_BOTH bool needs_care(double sum_squares, float max_abs, bool has_non_finite) {
  return has_non_finite || !(sum_squares <= 1.7976931348623157e308) ||
         (sum_squares < kTinySquares && max_abs > 0);
}

template <int N>
AMP_MP_BOTH double add_halving(double (&lane)[N]) {
  for (int d = N / 2; d > 0; d /= 2)
    for (int k = 0; k < d; ++k) lane[k] += lane[k + d];
  return lane[0];
}

AMP_MP_BOTH void add_to(Statistics& total, const Statistics& part) {
  total.sum_squares += part.sum_squares;
  total.max_abs = part.max_abs > total.max_abs ? part.max_abs : total.max_abs;
  total.non_finite += part.non_finite;
}

AMP_MP_BOTH void add_to(UpdateSums& total, const UpdateSums& part) {
  total.update += part.update;
  total.along += part.along;
  total.weight += part.weight;
}

// Adds the spans of a tensor, or the tensors of a call, on one thread. cuda/combine.h does the same
// with a block of threads, one lane for each.
inline Statistics combine(const Statistics* parts, int64_t count) {
  if (count == 1) return parts[0];  // the same result: the other lanes add zeros
  double lane[kSumLanes] = {};
  Statistics total = {};
  for (int64_t i = 0; i < count; ++i) {
    lane[i % kSumLanes] += parts[i].sum_squares;
    add_to(total, parts[i]);
  }
  total.sum_squares = add_halving(lane);
  return total;
}

}  // namespace amp_mp
