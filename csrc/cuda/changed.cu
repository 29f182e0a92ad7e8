// Finding what has changed and putting it elsewhere (core/changes.h): the look, gather and scatter
// passes of cpu/passes.h.
#include "cuda/changes.h"
#include "cuda/passes.h"
#include "cuda/tensor_table.h"

namespace amp_mp::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kBlocks = 4;  // per multiprocessor
constexpr int kWord = 64;
static_assert(kThreads * kWord == kLookChunk, "in a gather pass each thread has one word of bits");

using LookTable = TensorTable<3>;  // weights, Changes::sum, Look

// Where a tensor's changes go.
struct Into {
  int64_t first;
  Rows rows;
};
using GatherTable = TensorTable<5, Into>;  // weights, Changes::sum, ends, positions, values
using ScatterTable = TensorTable<4>;       // positions, values, to, the limit as a pointer

// The sum over the threads of a block, for its first thread.
__device__ __forceinline__ int add_in_block(int own) {
  __shared__ int of_warp[kWarps];
  for (int d = 16; d > 0; d /= 2) own += __shfl_xor_sync(kWarp, own, d);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = own;
  __syncthreads();
  int sum = 0;
  for (int each : of_warp) sum += each;
  return sum;
}

// What the threads before this one have together.
__device__ __forceinline__ int add_before(int own) {
  __shared__ int of_warp[kWarps];
  const int lane = int(threadIdx.x) % 32, warp = int(threadIdx.x) / 32;
  int sum = own;
  for (int d = 1; d < 32; d *= 2) {
    const int before = __shfl_sync(kWarp, sum, lane - d);
    if (lane >= d) sum += before;
  }
  if (lane == 31) of_warp[warp] = sum;
  __syncthreads();
  for (int w = 0; w < warp; ++w) sum += of_warp[w];
  return sum - own;
}

__global__ void __launch_bounds__(kThreads, kBlocks)
    look_kernel(const LookTable __grid_constant__ table, int32_t* counts) {
  const Chunk chunk = find_chunk(table);
  const uint32_t tag = table.tag(chunk.slot);
  const Format compared_as = Format(tag >> 5 & 31);
  const Array weights = {table.data[0][chunk.slot], Format(tag & 31)};
  const Changes changes = {static_cast<uint64_t*>(table.data[1][chunk.slot])};
  auto* const found = static_cast<Look*>(table.data[2][chunk.slot]);
  const bool wide = is_wide(weights.data);
  uint32_t sum = 0;
  int bits = 0;
  for (int base = 0; base < chunk.size; base += kThreads * kPack) {  // as often in all threads
    const int i = base + int(threadIdx.x) * kPack, n = chunk.size - i;
    const int64_t at = chunk.begin + i;
    const Numbers now = Numbers::read(weights, compared_as, at, n, wide && has_eight(n));
    sum += dot_of(now) * coefficient_of_tile(at / kChangesTile);
    if (changes.sum && n > 0) bits += __popc(changes.bits()[at / kPack]);
  }
  add_to_sum(&found->sum, sum);
  bits = add_in_block(bits);
  if (threadIdx.x != 0) return;
  counts[table.chunk_offset + blockIdx.x] = bits;
  if (bits != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&found->bits), bits);
  if (chunk.begin == 0 && changes.sum) found->noted = *changes.sum;
}

template <class Position>
__device__ __forceinline__ void gather_word(uint64_t left, int64_t word, int64_t to,
                                            const Array& weights, Format as, const Into& into,
                                            Position* positions, uint16_t* values) {
  for (; left != 0; left &= left - 1, ++to) {
    const int64_t at = word * kWord + __popcll((left & (~left + 1)) - 1);
    positions[to] = Position(place_of(into.first, into.rows, at));
    values[to] = weights.format == Format::float32
                     ? compared(static_cast<const float*>(weights.data)[at], as)
                     : static_cast<const uint16_t*>(weights.data)[at];
  }
}

__global__ void __launch_bounds__(kThreads, kBlocks)
    gather_kernel(const GatherTable __grid_constant__ table) {
  const Chunk chunk = find_chunk(table);
  const int64_t number = chunk.begin / kLookChunk;
  const auto* const ends = static_cast<const int64_t*>(table.data[2][chunk.slot]);
  if (ends[number] == ends[number - 1]) return;  // nothing has changed here
  const uint32_t tag = table.tag(chunk.slot);
  const Format compared_as = Format(tag >> 5 & 31);
  const Array weights = {table.data[0][chunk.slot], Format(tag & 31)};
  const Changes changes = {static_cast<uint64_t*>(table.data[1][chunk.slot])};
  const int64_t word = (chunk.begin + int(threadIdx.x) * kWord) / kWord;
  const uint64_t bits = int(threadIdx.x) * kWord < chunk.size ? changes.words()[word] : 0;
  const int64_t to = ends[number - 1] - ends[-1] + add_before(__popcll(bits));
  void* const positions = table.data[3][chunk.slot];
  auto* const values = static_cast<uint16_t*>(table.data[4][chunk.slot]);
  const Into& into = table.extra[chunk.slot];
  if (tag >> 10 & 1)
    gather_word(bits, word, to, weights, compared_as, into, static_cast<int64_t*>(positions),
                values);
  else
    gather_word(bits, word, to, weights, compared_as, into, static_cast<int32_t*>(positions),
                values);
}

__device__ __forceinline__ int64_t position_of(const ScatterTable& table, const Chunk& chunk,
                                               int64_t i) {
  const void* const positions = table.data[0][chunk.slot];
  return table.tag(chunk.slot) & 1 ? static_cast<const int64_t*>(positions)[i]
                                   : static_cast<const int32_t*>(positions)[i];
}

__global__ void __launch_bounds__(kThreads, kBlocks)
    check_kernel(const ScatterTable __grid_constant__ table, int32_t* bad) {
  const Chunk chunk = find_chunk(table);
  const auto limit = reinterpret_cast<uint64_t>(table.data[3][chunk.slot]);
  int outside = 0;
  for (int i = int(threadIdx.x); i < chunk.size; i += kThreads)
    outside += uint64_t(position_of(table, chunk, chunk.begin + i)) >= limit;
  if (outside != 0) atomicAdd(&bad[table.first_index + chunk.slot], outside);
}

__global__ void __launch_bounds__(kThreads, kBlocks)
    scatter_kernel(const ScatterTable __grid_constant__ table) {
  const Chunk chunk = find_chunk(table);
  const int log2_width = int(table.tag(chunk.slot) >> 1);
  const void* const values = table.data[1][chunk.slot];
  void* const to = table.data[2][chunk.slot];
  const auto put = [&](int64_t position, int64_t i, auto kind) {
    using Value = decltype(kind);
    static_cast<Value*>(to)[position] = static_cast<const Value*>(values)[i];
  };
  for (int k = int(threadIdx.x); k < chunk.size; k += kThreads) {
    const int64_t i = chunk.begin + k, position = position_of(table, chunk, i);
    switch (log2_width) {
      case 0: put(position, i, uint8_t()); break;
      case 1: put(position, i, uint16_t()); break;
      case 2: put(position, i, uint32_t()); break;
      default: put(position, i, uint64_t());
    }
  }
}

// Launches for all items, in tables that `fill` adds an item's pointers to; it returns the tag.
template <class Table, class Item, class Fill, class Launch>
const char* for_tables(const Item* items, int64_t count, int chunk, const Fill& fill,
                       const Launch& launch) {
  auto& table = table_of_thread<Table>();
  int64_t chunks = 0;
  for (int64_t i = 0; i < count;) {
    table.reset(i, chunks, chunk);
    for (; i < count && !table.full(); ++i) table.add(items[i].size, fill(table, items[i]));
    chunks += table.blocks();
    if (table.blocks() == 0) continue;
    if (const char* error = message(launch(table))) return error;
  }
  return nullptr;
}

uint32_t tag_of(const Array& weights, const Changes& changes) {
  return uint32_t(weights.format) | uint32_t(changes.format) << 5;
}

uint32_t fill_scatter(ScatterTable& table, const Scattering& s) {
  table.data[0][table.count] = const_cast<void*>(s.positions);
  table.data[1][table.count] = const_cast<void*>(s.values);
  table.data[2][table.count] = s.to;
  table.data[3][table.count] = reinterpret_cast<void*>(s.limit);
  const uint32_t log2_width = s.width == 1 ? 0 : s.width == 2 ? 1 : s.width == 4 ? 2 : 3;
  return log2_width << 1 | uint32_t(s.wide);
}

}  // namespace

const char* look(const Watched* watched, int64_t count, int32_t* counts, void* stream) {
  return for_tables<LookTable>(
      watched, count, kLookChunk,
      [](LookTable& table, const Watched& w) {
        table.data[0][table.count] = w.weights.data;
        table.data[1][table.count] = w.changes.sum;
        table.data[2][table.count] = w.found;
        return tag_of(w.weights, w.changes);
      },
      [&](const LookTable& table) {
        return launch(look_kernel, table.blocks(), kThreads, static_cast<cudaStream_t>(stream),
                      table, counts);
      });
}

const char* gather(const Gathering* gatherings, int64_t count, void* stream) {
  return for_tables<GatherTable>(
      gatherings, count, kLookChunk,
      [](GatherTable& table, const Gathering& g) {
        table.data[0][table.count] = g.weights.data;
        table.data[1][table.count] = g.changes.sum;
        table.data[2][table.count] = const_cast<int64_t*>(g.ends);
        table.data[3][table.count] = g.positions;
        table.data[4][table.count] = g.values;
        table.extra[table.count] = {g.origin.first, Rows::of(g.origin)};
        return tag_of(g.weights, g.changes) | uint32_t(g.wide) << 10;
      },
      [&](const GatherTable& table) {
        return launch(gather_kernel, table.blocks(), kThreads, static_cast<cudaStream_t>(stream),
                      table);
      });
}

const char* check_positions(const Scattering* scatterings, int64_t count, int32_t* bad,
                            void* stream) {
  const int chunk = chunk_elements(count_elements(scatterings, count), kBlocks);
  return for_tables<ScatterTable>(scatterings, count, chunk, fill_scatter,
                                  [&](const ScatterTable& table) {
                                    return launch(check_kernel, table.blocks(), kThreads,
                                                  static_cast<cudaStream_t>(stream), table, bad);
                                  });
}

const char* scatter(const Scattering* scatterings, int64_t count, void* stream) {
  const int chunk = chunk_elements(count_elements(scatterings, count), kBlocks);
  return for_tables<ScatterTable>(scatterings, count, chunk, fill_scatter,
                                  [&](const ScatterTable& table) {
                                    return launch(scatter_kernel, table.blocks(), kThreads,
                                                  static_cast<cudaStream_t>(stream), table);
                                  });
}

}  // namespace amp_mp::cuda
