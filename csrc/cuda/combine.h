#pragma once
// Adds up the sums of spans that a measuring kernel has written: to sums of tensors and of the
// list, in the order of core/reduce.h. Each thread is one of its 256 lanes.
// Note: One order of sums (docs/design.md)
#include "cuda/pack8.h"
#include "cuda/passes.h"

namespace amp_mp::cuda {

constexpr int kCombineThreads = kSumLanes;
constexpr int kCombineBlocks = 128;  // at most, so that all run at once on a large GPU

// Memory that the threads of a block share while they combine.
struct CombineShared {
  Statistics lane[kCombineThreads];
  int64_t first[kCombineThreads], spans[kCombineThreads];  // of the tensor of each thread
  bool is_last;
};

__device__ __forceinline__ Statistics shuffle_down(const Statistics& s, int d) {
  return {__shfl_down_sync(kWarp, s.sum_squares, d), __shfl_down_sync(kWarp, s.max_abs, d),
          __shfl_down_sync(kWarp, s.non_finite, d)};
}

// The sum of `count` parts, computed by the whole block; the first thread gets it.
__device__ __forceinline__ Statistics combine_block(const Statistics* parts, int64_t count,
                                                    CombineShared& shared) {
  constexpr int kBatch = 4, kStep = kBatch * kCombineThreads;  // loads in flight, to hide latency
  Statistics sum = {};
  int64_t i = threadIdx.x;
  for (; i + kStep - kCombineThreads < count; i += kStep) {
    Statistics batch[kBatch];
    for (int b = 0; b < kBatch; ++b) batch[b] = parts[i + b * kCombineThreads];
    for (int b = 0; b < kBatch; ++b) add_to(sum, batch[b]);
  }
  for (; i < count; i += kCombineThreads) add_to(sum, parts[i]);
  __syncthreads();  // no thread uses `shared` any more
  shared.lane[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return {};
  constexpr int kRows = kCombineThreads / 32;  // the tree's upper levels are within a thread
  double squares[kRows];
  for (int r = 0; r < kRows; ++r) {
    const Statistics& own = shared.lane[32 * r + int(threadIdx.x)];
    squares[r] = own.sum_squares;
    if (r > 0) add_to(sum, own);
  }
  sum.sum_squares = add_halving(squares);
  for (int d = 16; d > 0; d /= 2) add_to(sum, shuffle_down(sum, d));
  return sum;
}

// Combines this block's share of the tensors. One thread copies the sum of a tensor of one span;
// the whole block adds the spans of a larger one.
__device__ __forceinline__ void combine_tensors(const SpanSums& list, CombineShared& shared) {
  const int64_t stride = gridDim.x;
  for (int64_t base = blockIdx.x; base < list.count; base += stride * kCombineThreads) {
    const int64_t t = base + threadIdx.x * stride;
    int64_t first = 0, spans = 0;
    if (t < list.count) {
      first = list.first_span[t];
      spans = list.first_span[t + 1] - first;
      if (spans <= 1) list.tensors[t] = spans == 1 ? list.spans[first] : Statistics{};
    }
    __syncthreads();
    shared.first[threadIdx.x] = first;
    shared.spans[threadIdx.x] = spans;
    __syncthreads();
    for (int j = 0; j < kCombineThreads && base + j * stride < list.count; ++j) {
      if (shared.spans[j] <= 1) continue;
      const Statistics sum = combine_block(list.spans + shared.first[j], shared.spans[j], shared);
      if (threadIdx.x == 0) list.tensors[base + j * stride] = sum;
    }
  }
}

// True in the block that calls this last: it sees the results of all other blocks. `ticket` must be
// 0 when the kernel begins.
__device__ __forceinline__ bool is_last_block(unsigned* ticket, CombineShared& shared) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // the whole block's writes, which the barrier has shown to this thread
    shared.is_last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  return shared.is_last;
}

// Combines the tensors of two lists, of which one may be empty. Returns true in the one block that
// may read all results. Every thread of the grid must call it.
__device__ __forceinline__ bool combine_lists(const SpanSums& one, const SpanSums& other,
                                              CombineShared& shared) {
  if (one.spans) combine_tensors(one, shared);
  if (other.spans) combine_tensors(other, shared);
  // A single block combines at most one tensor, whose sum the first thread has written and reads.
  return gridDim.x == 1 || is_last_block(one.spans ? one.ticket : other.ticket, shared);
}

// Adds the tensors of a list, in the block for which combine_lists returned true, and writes the
// total into the list's last element. The first thread gets it.
__device__ __forceinline__ Statistics combine_total(const SpanSums& list, CombineShared& shared) {
  const Statistics total = combine_block(list.tensors, list.count, shared);
  if (threadIdx.x == 0) list.tensors[list.count] = total;
  return total;
}

// One block for each tensor, but not more than can run at once.
inline int64_t combine_blocks(const SpanSums& one, const SpanSums& other) {
  const int64_t a = one.spans ? one.count : 0, b = other.spans ? other.count : 0;
  const int64_t count = a > b ? a : b;
  return count < 1 ? 1 : count < kCombineBlocks ? count : kCombineBlocks;
}

}  // namespace amp_mp::cuda
