#pragma once
// How threads share a span of 65,536 elements, in the order of core/reduce.h: eight threads sum a
// block of 4,096, and each has eight of its 64 lanes. Together they read a row of 64 elements in
// adjacent 16-byte pieces.
#include "cuda/pack8.h"

namespace amp_mp::cuda {

constexpr int kBlockThreads = kLanes / kPack;              // threads for a block of 4,096
constexpr int kSpanThreads = kBlockThreads * kSpanBlocks;  // threads for a span

// Fills SpanSums' first_span and clears its ticket; the first thread block of each launch does it.
template <class Table>
__device__ __forceinline__ void init_span_sums(const Table& table, int64_t* first_span,
                                               unsigned* ticket) {
  if (blockIdx.x != 0) return;
  for (int t = threadIdx.x; t <= table.count; t += kSpanThreads)
    first_span[table.first_index + t] = table.chunk_offset + table.first_chunk[t];
  if (threadIdx.x == 0) *ticket = 0;
}

// The halving tree over 64 lanes; lane 8 t + k is element k of thread t. All eight threads get the
// sum.
__device__ __forceinline__ double add_block_lanes(double (&lane)[kPack]) {
  for (int d = kBlockThreads / 2; d > 0; d /= 2)
    for (int k = 0; k < kPack; ++k) lane[k] += __shfl_down_sync(kWarp, lane[k], d, kBlockThreads);
  return __shfl_sync(kWarp, add_halving(lane), 0, kBlockThreads);
}

// Adds the blocks of 4,096 in order and writes the span's sum; `blocks` is shared memory.
__device__ __forceinline__ void add_blocks(Statistics (&blocks)[kSpanBlocks], const Statistics& own,
                                           int size, Statistics* span) {
  if (threadIdx.x % kBlockThreads == 0) blocks[threadIdx.x / kBlockThreads] = own;
  __syncthreads();
  if (threadIdx.x != 0) return;
  Statistics total = {};
  for (int b = 0; b < kSpanBlocks && b * kBlock < size; ++b) add_to(total, blocks[b]);
  *span = total;
}

}  // namespace amp_mp::cuda
