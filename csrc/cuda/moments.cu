// The first pass of rules that need their update's norm (LAMB): advances the moments and sums the
// squares of the update in the order of core/reduce.h. span_threads.h has the layout of threads.
#include "cuda/passes.h"
#include "cuda/slot_table.h"
#include "cuda/span_threads.h"

namespace amp_mp::cuda {
namespace {

template <class Rule>
__global__ void __launch_bounds__(kSpanThreads)
    moments_kernel(const StepList __grid_constant__ table, int blocks_in_list,
                   const Verdict* __restrict__ verdict,
                   const SlotRule<Rule>* __restrict__ slot_rules, Statistics* __restrict__ spans,
                   int64_t* __restrict__ first_span, unsigned* ticket) {
  __shared__ Statistics blocks[kSpanBlocks];
  if (blockIdx.x == 0) {
    for (int t = threadIdx.x; t <= table.count; t += kSpanThreads)
      first_span[t] = table.starts[t].first_chunk;
    if (threadIdx.x == 0) *ticket = 0;
  }
  if (int(blockIdx.x) >= blocks_in_list) return;  // all tensors are empty
  const double found_inf = verdict->found_inf;    // arrives while the chunk is looked for
  const Chunk chunk = find_chunk(table);
  if (found_inf != 0) {
    if (threadIdx.x == 0) spans[blockIdx.x] = {};  // others may gather them
    return;
  }

  const SlotRule<Rule>& slot_rule = slot_rules[chunk.slot];
  const View<Rule> slot(table.entries[chunk.slot], slot_rule);
  const Rule rule = slot_rule.rule;
  const float multiplier = slot_rule.multiplier;
  const bool draws = slot.draws();
  const int block = int(threadIdx.x) / kBlockThreads,
            lane0 = int(threadIdx.x) % kBlockThreads * kPack;
  float sum[kPack] = {};
  double careful[kPack] = {};  // made in any case: the old moments cannot be read again
  float largest = 0;
  double bad = 0;
  // Every thread reads as many rows, because groups exchange numbers within whole warps.
  for (int row = 0; row < kBlock && row < chunk.size; row += kLanes) {
    const int i = block * kBlock + row + lane0, n = chunk.size - i;
    const int64_t at = chunk.begin + i;
    const bool whole = slot.wide && has_eight(n);
    float g[kPack] = {}, w[kPack] = {}, m[kPack] = {}, v[kPack] = {};
    load<kGradFormats>(g, slot.grad, at, n, whole);
    load<kMasterFormats>(w, slot.master, at, n, whole);
    load<kFormatsOfState<Rule, 0>>(m, slot.state[0], at, n, whole);
    load<kFormatsOfState<Rule, 1>>(v, slot.state[1], at, n, whole);
    for (int k = 0; k < kPack; ++k) {
      rule.moments(g[k] * multiplier, w[k], m[k], v[k]);
      if (k >= n) continue;
      const float d = rule.direction(w[k], m[k], v[k]), magnitude = fabsf(d);
      sum[k] += d * d;
      if (is_finite(d)) {
        careful[k] += double(magnitude) * double(magnitude);
        largest = magnitude > largest ? magnitude : largest;
      } else {
        bad += 1;
      }
    }
    const uint64_t random = draws ? slot.again().randomness().eight(false, at) : 0;
    store_history<kFormatsOfState<Rule, 0>>(slot.state[0], m, at, n, whole, random);
    store_history<kFormatsOfState<Rule, 1>>(slot.state[1], v, at, n, whole, random);
  }
  double lane[kPack];
  for (int k = 0; k < kPack; ++k) lane[k] = sum[k];
  for (int d = kBlockThreads / 2; d > 0; d /= 2) {
    const float other = __shfl_xor_sync(kWarp, largest, d, kBlockThreads);
    largest = other > largest ? other : largest;
    bad += __shfl_xor_sync(kWarp, bad, d, kBlockThreads);
  }
  const double quick = add_block_lanes(lane), slow = add_block_lanes(careful);
  const bool care = needs_care(quick, largest, bad > 0);
  add_blocks(blocks, {care ? slow : quick, largest, bad}, chunk.size, spans + blockIdx.x);
}

}  // namespace

template <class Rule>
const char* moments(const StepPlan& plan, const StepTable& table, const Verdict* verdict,
                    const SlotRule<Rule>* slot_rules, const NormInputs& norms, void* stream) {
  const int blocks = blocks_of(plan, table, true);
  return message(launch(moments_kernel<Rule>, blocks > 0 ? blocks : 1, kSpanThreads,
                        static_cast<cudaStream_t>(stream), list_of(plan, table, true), blocks,
                        verdict, slot_rules, norms.update_spans, norms.first_span, norms.ticket));
}

template const char* moments<LAMB>(const StepPlan&, const StepTable&, const Verdict*,
                                   const SlotRule<LAMB>*, const NormInputs&, void*);

}  // namespace amp_mp::cuda
