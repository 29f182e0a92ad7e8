#pragma once
// The slots of a step as apply and update_sums read them, in device memory: where the arrays are,
// and which slot a thread block works on. What changes in every step is in SlotRule (plan.h).
#include <climits>
#include <cstring>

#include "cuda/layouts.h"
#include "cuda/pack8.h"
#include "cuda/passes.h"
#include "cuda/tensor_table.h"

namespace amp_mp::cuda {

static_assert(kGroupedStates == 2 && kMaxStates == 3);

// One slot, without gaps between members: the host compares bytes. Threads read 16 bytes at a time.
struct alignas(16) SlotEntry {
  void *master, *second;
  void *state0, *scales0, *state1, *scales1, *state2;
  Clock* clock;
  int64_t size;
  uint32_t tag;           // formats of the arrays
  uint32_t tensor_index;  // for random bits, as `first` and `rows`
  int32_t group, row;     // index of its Hyper, and Slot::row
  int64_t first;
  Rows rows;
  uint64_t* changes;  // Changes::sum
};
static_assert(sizeof(SlotEntry) == 128);
SlotEntry entry_of(const Slot& s);

// Where the chunks of a slot start. Thread block b works on the last one whose first_chunk is not
// above b. An empty tensor has the same first_chunk as the next one: it costs nothing and needs no
// test.
struct alignas(8) Start {
  int32_t first_chunk;
  int32_t slot;  // index of its SlotEntry and SlotRule
};

// What apply and update_sums get as arguments.
struct StepList {
  const SlotEntry* entries;
  const Start* starts;
  int32_t count;            // of starts
  int32_t chunk;            // elements
  int32_t first_block = 0;  // the thread block that has the first chunk
};

// Every lane of a warp looks at one of the starts, so that 1,024 slots take two rounds, 32,768
// three.
__device__ __forceinline__ Chunk find_chunk(const StepList& table) {
  const int block = int(blockIdx.x) - table.first_block, lane = int(threadIdx.x) % 32;
  int low = 0, count = table.count, stride, found;
  Start start;
  do {
    stride = (count + 31) / 32;
    const int at = lane * stride;
    start = at < count ? table.starts[low + at] : Start{INT_MAX, 0};
    found = __popc(__ballot_sync(kWarp, start.first_chunk <= block)) - 1;
    low += found * stride;
    count = count - found * stride < stride ? count - found * stride : stride;
  } while (stride > 1);
  const int slot = __shfl_sync(kWarp, start.slot, found);
  const int64_t begin = int64_t(block - __shfl_sync(kWarp, start.first_chunk, found)) * table.chunk;
  const int64_t left = table.entries[slot].size - begin;
  const int size = left < table.chunk ? int(left) : table.chunk;
  // Or a loop's first test waits for the size before the slot's other loads begin.
  assume(size > 0);
  return {slot, begin, size};
}

// Where the parts of StepTable's memory are, which travels in pieces of sixteen bytes.
struct TableLayout {
  int64_t entries = 0, hypers, starts, spans, grads, bytes;

  TableLayout(int64_t rows, int64_t groups)
      : hypers(rows * int64_t(sizeof(SlotEntry))),
        starts(hypers + groups * int64_t(sizeof(Hyper))),
        spans(starts + (rows + 1) * int64_t(sizeof(Start))),  // for update_sums
        grads(spans + (rows + 1) * int64_t(sizeof(Start))),
        bytes(ceil_divide(grads + rows * int64_t(sizeof(void*)), 16) * 16) {}
};

// The list for apply, or the one for update_sums.
inline StepList list_of(const StepPlan& plan, const StepTable& table, bool spans) {
  const TableLayout layout(table.rows, table.groups);
  return {reinterpret_cast<const SlotEntry*>(table.memory + layout.entries),
          reinterpret_cast<const Start*>(table.memory + (spans ? layout.spans : layout.starts)),
          int32_t(plan.count), spans ? int32_t(kSpan) : plan.chunk};
}

// Calls f(t, start) for each slot of a list, and once more with the number of all chunks.
template <class F>
void for_each_start(const StepPlan& plan, int64_t chunk, const F& f) {
  int32_t chunks = 0;
  for (int64_t t = 0; t < plan.count; ++t) {
    const int64_t size = plan.slots[t].size;
    f(t, Start{chunks, int32_t(plan.slots[t].row)});
    chunks += size > chunk ? int32_t(ceil_divide(size, chunk)) : size > 0;
  }
  f(plan.count, Start{chunks, 0});
}

// Thread blocks of apply, or of update_sums; of a long plan after write_table.
inline int blocks_of(const StepPlan& plan, const StepTable& table, bool spans) {
  int blocks = 0;
  if (!table.mirror) {
    for_each_start(plan, spans ? kSpan : plan.chunk,
                   [&](int64_t, const Start& start) { blocks = start.first_chunk; });
    return blocks;
  }
  const TableLayout layout(table.rows, table.groups);
  const int64_t from = spans ? layout.spans : layout.starts;
  std::memcpy(&blocks, table.mirror + from + plan.count * int64_t(sizeof(Start)), sizeof blocks);
  return blocks;
}

}  // namespace amp_mp::cuda
