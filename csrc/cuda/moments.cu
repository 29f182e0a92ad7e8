// The first pass of rules that need their update's norm (LAMB): advances the moments and sums the
// squares of the update in the order of core/reduce.h. span_threads.h has the layout of threads.
#include "cuda/passes.h"
#include "cuda/slot_table.h"
#include "cuda/span_threads.h"

namespace amp_mp::cuda {
namespace {

template <class Rule>
__global__ void __launch_bounds__(kSpanThreads)
    moments_kernel(const SlotTable<Rule> __grid_constant__ table,
                   const Verdict* __restrict__ verdict,
                   const SlotRule<Rule>* __restrict__ slot_rules, Statistics* __restrict__ spans,
                   int64_t* __restrict__ first_span, unsigned* ticket) {
  __shared__ Statistics blocks[kSpanBlocks];
  init_span_sums(table, first_span, ticket);
  if (int(blockIdx.x) >= table.first_chunk[table.count]) return;  // all tensors are empty
  if (verdict->found_inf != 0) {
    if (threadIdx.x == 0) spans[table.chunk_offset + blockIdx.x] = {};  // others may gather them
    return;
  }

  const Chunk chunk = find_chunk(table);
  const View<Rule> slot(table, chunk.slot);
  const SlotRule<Rule>& slot_rule = slot_rules[table.first_index + chunk.slot];
  const Rule rule = slot_rule.rule;
  const float multiplier = slot_rule.multiplier;
  const bool draws = slot.draws();
  const Randomness randomness = slot.randomness(slot_rule);
  const int block = int(threadIdx.x) / kBlockThreads,
            lane0 = int(threadIdx.x) % kBlockThreads * kPack;
  float sum[kPack] = {};
  double careful[kPack] = {};  // made in any case: the old moments cannot be read again
  float largest = 0;
  double bad = 0;
  // Every thread reads as many rows, because groups exchange numbers within whole warps.
  for (int row = 0; row < kBlock && row < chunk.size; row += kLanes) {
    const int i = block * kBlock + row + lane0, left = chunk.size - i;
    const int n = left < 0 ? 0 : left < kPack ? left : kPack;
    const int64_t at = chunk.begin + i;
    const bool whole = slot.wide && n == kPack;
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
    const uint64_t random = draws ? randomness.eight(false, at) : 0;
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
  add_blocks(blocks, {care ? slow : quick, largest, bad}, chunk.size,
             spans + table.chunk_offset + blockIdx.x);
}

}  // namespace

template <class Rule>
const char* moments(const Slot* slots, int64_t count, const Verdict* verdict,
                    const SlotRule<Rule>* slot_rules, const NormInputs& norms, void* stream) {
  auto& table = table_of_thread<SlotTable<Rule>>();
  int64_t chunks = 0;
  for (int64_t i = 0; i < count;) {
    fill<Rule>(table, slots, i, count, int(kSpan), chunks);
    chunks += table.blocks();
    const int blocks = table.blocks() > 0 ? table.blocks() : 1;
    if (const char* error = message(
            launch(moments_kernel<Rule>, blocks, kSpanThreads, static_cast<cudaStream_t>(stream),
                   table, verdict, slot_rules, norms.update_spans, norms.first_span, norms.ticket)))
      return error;
  }
  return nullptr;
}

template const char* moments<LAMB>(const Slot*, int64_t, const Verdict*, const SlotRule<LAMB>*,
                                   const NormInputs&, void*);

}  // namespace amp_mp::cuda
