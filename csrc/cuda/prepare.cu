// The first pass of the rules that need their update's norm: advances the moments and measures the
// direction, in the order of core/reduce.h. Threads are laid out as team.h says.
#include "cuda/passes.h"
#include "cuda/slots.h"
#include "cuda/team.h"

namespace amp_mp::cuda {
namespace {

template <class Rule>
__global__ void __launch_bounds__(kSpanThreads)
    prepare_kernel(const SlotTable<Rule> __grid_constant__ table,
                   const Verdict* __restrict__ verdict, const Ready<Rule>* __restrict__ ready,
                   Statistics* __restrict__ spans, int64_t* __restrict__ first_span,
                   unsigned* ticket) {
  __shared__ Statistics blocks[kSpanBlocks];
  begin_list(table, first_span, ticket);
  if (verdict->found_inf != 0 || int(blockIdx.x) >= table.first_chunk[table.count]) return;

  const Chunk chunk = find_chunk(table);
  const View<Rule> slot(table, ready, chunk.slot);
  const Rule rule = slot.ready.rule;
  const float multiplier = slot.ready.multiplier;
  const bool draws = slot.draws();
  const int block = int(threadIdx.x) / kTeam, lane0 = int(threadIdx.x) % kTeam * kPack;
  float sum[kPack] = {};
  double careful[kPack] = {};  // the moments are gone after one pass, so both sums are made
  float largest = 0;
  double bad = 0;
  // As many rows for every block of the span: the formats that talk need whole warps.
  for (int row = 0; row < kBlock && row < chunk.size; row += kLanes) {
    const int i = block * kBlock + row + lane0, left = chunk.size - i;
    const int n = left < 0 ? 0 : left < kPack ? left : kPack;
    const int64_t at = chunk.begin + i;
    const bool whole = slot.wide && n == kPack;
    float g[kPack] = {}, w[kPack] = {}, m[kPack] = {}, v[kPack] = {};
    load<kGradFormats>(g, slot.grad, at, n, whole);
    load<kMasterFormats>(w, slot.master, at, n, whole);
    load<kStateFormats>(m, slot.state[0], at, n, whole);
    load<kSquareFormats>(v, slot.state[1], at, n, whole);
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
    const uint64_t random = draws ? slot.random(false, at) : 0;
    store_history<kStateFormats>(slot.state[0], m, at, n, whole, random);
    store_history<kSquareFormats>(slot.state[1], v, at, n, whole, random);
  }
  double lane[kPack];
  for (int k = 0; k < kPack; ++k) lane[k] = sum[k];
  for (int d = kTeam / 2; d > 0; d /= 2) {
    const float other = __shfl_xor_sync(kWarp, largest, d, kTeam);
    largest = other > largest ? other : largest;
    bad += __shfl_xor_sync(kWarp, bad, d, kTeam);
  }
  const double quick = add_team(lane), slow = add_team(careful);
  const bool care = needs_care(quick, largest, bad > 0);
  add_blocks(blocks, {care ? slow : quick, largest, bad}, chunk.size,
             spans + table.chunk_offset + blockIdx.x);
}

}  // namespace

template <class Rule>
const char* prepare(const Slot* slots, int64_t count, const Verdict* verdict,
                    const Ready<Rule>* ready, const Measured& measured, void* stream) {
  auto& table = table_of_thread<SlotTable<Rule>>();
  int64_t chunks = 0;
  for (int64_t i = 0; i < count;) {
    take<Rule>(table, slots, i, count, int(kSpan), chunks);
    chunks += table.blocks();
    const int blocks = table.blocks() > 0 ? table.blocks() : 1;
    if (const char* error = message(launch(
            prepare_kernel<Rule>, blocks, kSpanThreads, static_cast<cudaStream_t>(stream), table,
            verdict, ready, measured.update_spans, measured.first_span, measured.ticket)))
      return error;
  }
  return nullptr;
}

template const char* prepare<LAMB>(const Slot*, int64_t, const Verdict*, const Ready<LAMB>*,
                                   const Measured&, void*);

}  // namespace amp_mp::cuda
