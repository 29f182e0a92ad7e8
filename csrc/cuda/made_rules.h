#pragma once
// Rules that one slot makes for others. Making one takes some 40 operations in double precision, of
// which a consumer's GPU does one for every 64 in float32: with a leader for each group and clock,
// 500 slots take as long as a warp of them. It goes once the list "many" of benchmarks/gpu takes
// less than 1.03 times as long where each slot makes its own rule, on a GPU with so few doubles.
#include <algorithm>

#include "core/rules.h"
#include "cuda/step_table.h"

namespace amp_mp::cuda {

#define AMP_MP_SIZE(Rule, op) sizeof(SlotRule<Rule>),
constexpr size_t kLargestRule = std::max({AMP_MP_FOR_EACH_RULE(AMP_MP_SIZE) size_t(0)});
#undef AMP_MP_SIZE

// What the threads of a block share while they make rules. Slots of one group whose clocks are
// equal have equal rules. Groups and clocks are hashed to places, and a place has one leader: slots
// of its other groups and clocks make their own rules.
class MadeRules {
 public:
  // Every thread of the block calls it before a pass over slots.
  __device__ __forceinline__ void clear() {
    __syncthreads();  // the rules of the pass before are copied
    if (threadIdx.x < kPlaces) leader_[threadIdx.x] = -1;
    if (threadIdx.x < kPlaces) group_[threadIdx.x] = -1;
    __syncthreads();
  }

  // Offers slot t as a leader; the last one leads.
  __device__ __forceinline__ void stand(int group, const Clock& clock, int t) {
    atomicMax(&leader_[place(group, clock)], t);
  }
  __device__ __forceinline__ bool leads(int group, const Clock& clock, int t) const {
    return leader_[place(group, clock)] == t;
  }

  // before, after: the slot's clock before and after this step.
  template <class Rule>
  __device__ __forceinline__ void keep(int group, const Clock& before, const Clock& after,
                                       const SlotRule<Rule>& rule) {
    const int p = place(group, before);
    group_[p] = group;
    before_[p] = before;
    after_[p] = after;
    memcpy(rule_[p], &rule, sizeof rule);
  }

  // Whether a leader of this group and clock has made a rule: then both are filled.
  template <class Rule>
  __device__ __forceinline__ bool copy(int group, Clock& clock, SlotRule<Rule>& rule) const {
    const int p = place(group, clock);
    if (group_[p] != group || !same(before_[p], clock)) return false;
    clock = after_[p];
    memcpy(&rule, rule_[p], sizeof rule);
    return true;
  }

 private:
  static constexpr int kPlaceBits = 5, kPlaces = 1 << kPlaceBits;

  static __device__ __forceinline__ int place(int group, const Clock& clock) {
    uint64_t step;
    memcpy(&step, &clock.step, sizeof step);
    const uint64_t mixed = (step + uint64_t(group)) * 0x9E3779B97F4A7C15u;
    return int(mixed >> (64 - kPlaceBits));
  }

  // By their bits: doubles would be compared at the rate that leaders are there to avoid.
  static __device__ __forceinline__ bool same(const Clock& a, const Clock& b) {
    uint64_t x[4], y[4];
    static_assert(sizeof x == sizeof(Clock));
    memcpy(x, &a, sizeof x);
    memcpy(y, &b, sizeof y);
    return x[0] == y[0] && x[1] == y[1] && x[2] == y[2] && x[3] == y[3];
  }

  int leader_[kPlaces], group_[kPlaces];  // -1: none
  Clock before_[kPlaces], after_[kPlaces];
  alignas(16) unsigned char rule_[kPlaces][(kLargestRule + 15) / 16 * 16];
};

}  // namespace amp_mp::cuda
