#pragma once
// Of rules that need their update's norm: adds up squares of the update and the weights in the
// order of core/reduce.h. Without directions (LAMB) it first advances the moments; with them
// (MuonH) the update has been made of the directions. span_threads.h has the layout of threads.
// Included by apply.cu.
#include "cuda/passes.h"
#include "cuda/slot_table.h"
#include "cuda/span_threads.h"

namespace amp_mp::cuda {
namespace {

// The update of eight elements with the weights w.
template <class Rule>
__device__ __forceinline__ void update_of(const View<Rule>& slot, const Rule& rule,
                                          float multiplier, bool draws, const float (&w)[kPack],
                                          int64_t at, int n, bool whole, float (&u)[kPack]) {
  if constexpr (has_direction<Rule>) {
    load<kFormatsOfState<Rule, 1>>(u, slot.state[1], at, n, whole);
  } else {
    float g[kPack] = {}, m[kPack] = {}, v[kPack] = {};
    load<kGradFormats>(g, slot.grad, at, n, whole);
    load<kFormatsOfState<Rule, 0>>(m, slot.state[0], at, n, whole);
    load<kFormatsOfState<Rule, 1>>(v, slot.state[1], at, n, whole);
    for (int k = 0; k < kPack; ++k) rule.moments(g[k] * multiplier, w[k], m[k], v[k]);
    const uint64_t random = draws ? slot.again().randomness().eight(false, at) : 0;
    // The apply pass makes the update of what is stored.
    store_history<kFormatsOfState<Rule, 0>>(slot.state[0], m, at, n, whole, random)
        .decode(slot.state[0].format, m);
    store_history<kFormatsOfState<Rule, 1>>(slot.state[1], v, at, n, whole, random)
        .decode(slot.state[1].format, v);
    for (int k = 0; k < kPack; ++k) u[k] = rule.direction(w[k], m[k], v[k]);
  }
}

template <class Rule>
__global__ void __launch_bounds__(kSpanThreads)
    update_sums_kernel(const StepList __grid_constant__ table, int blocks_in_list,
                       const Verdict* __restrict__ verdict,
                       const SlotRule<Rule>* __restrict__ slot_rules,
                       Statistics* __restrict__ spans, int64_t* __restrict__ first_span,
                       unsigned* ticket) {
  __shared__ UpdateSums blocks[kSpanBlocks];
  if (blockIdx.x == 0) {
    for (int j = 0; j < kUpdateSums; ++j)
      for (int t = threadIdx.x; t < table.count; t += kSpanThreads)
        first_span[j * table.count + t] = j * blocks_in_list + table.starts[t].first_chunk;
    if (threadIdx.x == 0) {
      first_span[kUpdateSums * table.count] = kUpdateSums * blocks_in_list;
      *ticket = 0;
    }
  }
  if (int(blockIdx.x) >= blocks_in_list) return;  // all tensors are empty
  const double skip = verdict->skip;              // arrives while the chunk is looked for
  const Chunk chunk = find_chunk(table);
  Statistics* const to = spans + blockIdx.x;
  if (skip != 0) {
    if (int(threadIdx.x) < kUpdateSums)  // others may gather them
      to[int(threadIdx.x) * blocks_in_list] = {};
    return;
  }

  const SlotRule<Rule>& slot_rule = slot_rules[chunk.slot];
  const View<Rule> slot(table.entries[chunk.slot], slot_rule);
  const Rule rule = slot_rule.rule;
  const float multiplier = slot_rule.multiplier;
  const bool draws = slot.draws();
  const int block = int(threadIdx.x) / kBlockThreads,
            lane0 = int(threadIdx.x) % kBlockThreads * kPack;
  double update[kPack] = {}, along[kPack] = {}, weight[kPack] = {};
  // Every thread reads as many rows, because groups exchange numbers within whole warps.
  for (int row = 0; row < kBlock && row < chunk.size; row += kLanes) {
    const int i = block * kBlock + row + lane0, n = chunk.size - i;
    const int64_t at = chunk.begin + i;
    const bool whole = slot.wide && has_eight(n);
    float w[kPack] = {}, u[kPack] = {};
    load<kMasterFormats>(w, slot.master, at, n, whole);
    update_of(slot, rule, multiplier, draws, w, at, n, whole, u);
    for (int k = 0; k < kPack; ++k) {
      if (k >= n || !is_finite(u[k]) || !is_finite(w[k])) continue;
      const double a = u[k], b = w[k];
      update[k] += a * a;
      along[k] += a * b;
      weight[k] += b * b;
    }
  }
  const UpdateSums own = {add_block_lanes(update), add_block_lanes(along), add_block_lanes(weight)};
  if (threadIdx.x % kBlockThreads == 0) blocks[block] = own;
  __syncthreads();
  if (threadIdx.x != 0) return;
  UpdateSums total = {};
  for (int b = 0; b < kSpanBlocks && b * kBlock < chunk.size; ++b) add_to(total, blocks[b]);
  to[0] = {total.update, 0, 0};
  to[blocks_in_list] = {total.along, 0, 0};
  to[2 * blocks_in_list] = {total.weight, 0, 0};
}

template <class Rule>
const char* launch_update_sums(const StepList& list, int blocks, const Verdict* verdict,
                               const void* slot_rules, const NormInputs& norms,
                               cudaStream_t stream) {
  return message(launch(update_sums_kernel<Rule>, blocks > 0 ? blocks : 1, kSpanThreads, stream,
                        list, blocks, verdict, static_cast<const SlotRule<Rule>*>(slot_rules),
                        norms.update_spans, norms.first_span, norms.ticket));
}

}  // namespace
}  // namespace amp_mp::cuda
