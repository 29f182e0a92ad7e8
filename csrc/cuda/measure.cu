// One read of the gradients: what core/reduce.h prescribes. A block of threads owns a span
// (cuda/team.h).
#include "cuda/convert.h"
#include "cuda/passes.h"
#include "cuda/table.h"
#include "cuda/team.h"

namespace amp_mp::cuda {
namespace {

using MeasureTable = Table<2>;

constexpr int kCombineThreads = 1024;

// Elements of one array, and of a master in two. kBatch: rows in flight, what hides the memory's
// latency; where reading is long, more than one row would go by way of local memory.
template <class T>
struct Plain {
  using Raw = T;
  static constexpr int kBatch = 4;
  const T* x;
  __device__ __forceinline__ bool wide() const { return is_wide(x); }
  __device__ __forceinline__ void load(T (&out)[kPack], int at, int n, bool whole) const {
    cuda::load(out, x + at, n, whole);
  }
};

struct Joined {
  using Raw = float;
  static constexpr int kBatch = 1;
  Span span;
  int64_t begin;
  __device__ __forceinline__ bool wide() const {
    return is_wide(span.data) && is_wide(span.rest) && begin % 16 == 0;
  }
  __device__ __forceinline__ void load(float (&out)[kPack], int at, int n, bool whole) const {
    cuda::load<kMasterFormats>(out, span, begin + at, n < 0 ? 0 : n, whole);
  }
};

template <class Source>
__device__ __forceinline__ Statistics measure_block(const Source x, int n) {
  using T = typename Source::Raw;
  constexpr int kBatch = Source::kBatch;
  const int lane0 = int(threadIdx.x) % kTeam * kPack;
  const bool wide = x.wide();
  float sum[kPack] = {};
  uint32_t most = 0;  // bits of the largest |x|, infinity and NaN being the largest
  auto add = [&](const T(&raw)[kPack]) {
    for (int k = 0; k < kPack; ++k) {
      const float y = decode(raw[k]);
      const uint32_t magnitude = to_bits(y) & kMagnitude;
      sum[k] += y * y;
      most = magnitude > most ? magnitude : most;
    }
  };
  int row = 0;
  for (; wide && row + kBatch * kLanes <= n; row += kBatch * kLanes) {
    T raw[kBatch][kPack];
    for (int b = 0; b < kBatch; ++b) x.load(raw[b], row + b * kLanes + lane0, kPack, true);
    for (int b = 0; b < kBatch; ++b) add(raw[b]);
  }
  for (; row < n; row += kLanes) {
    const int left = n - row - lane0;
    T raw[kPack] = {};
    x.load(raw, row + lane0, left, wide && left >= kPack);
    add(raw);
  }
  double lane[kPack];
  for (int k = 0; k < kPack; ++k) lane[k] = sum[k];
  for (int d = kTeam / 2; d > 0; d /= 2) {
    const uint32_t other = __shfl_xor_sync(kWarp, most, d, kTeam);
    most = other > most ? other : most;
  }
  // Every thread of the team needs the sum to judge it.
  const double total = add_team(lane);
  Statistics s = {total, from_bits(most), 0};
  const bool care = needs_care(total, s.max_abs, most >= kInfinity);
  if (!__any_sync(kWarp, care)) return s;

  // Rare. The whole warp stays together for the shuffles; teams without need keep what they have.
  double again[kPack] = {};
  float largest = 0;
  uint32_t bad = 0;
  if (care)
    for (int i = lane0; i < n; i += kLanes) {
      T raw[kPack] = {};  // the zeros past the end add nothing
      x.load(raw, i, n - i, wide && n - i >= kPack);
      for (int k = 0; k < kPack; ++k) {
        const float y = fabsf(decode(raw[k]));
        if (is_finite(y)) {
          again[k] += double(y) * double(y);
          largest = y > largest ? y : largest;
        } else {
          ++bad;
        }
      }
    }
  for (int d = kTeam / 2; d > 0; d /= 2) {
    const float other = __shfl_xor_sync(kWarp, largest, d, kTeam);
    largest = other > largest ? other : largest;
    bad += __shfl_xor_sync(kWarp, bad, d, kTeam);
  }
  const double careful = add_team(again);
  return care ? Statistics{careful, largest, double(bad)} : s;
}

__device__ __forceinline__ Statistics measure_block(Span g, int64_t at, int n) {
  switch (g.format) {
    case Format::float32:
      return measure_block(Plain<float>{static_cast<const float*>(g.data) + at}, n);
    case Format::float16:
      return measure_block(Plain<float16>{static_cast<const float16*>(g.data) + at}, n);
    case Format::bfloat16:
      return measure_block(Plain<bfloat16>{static_cast<const bfloat16*>(g.data) + at}, n);
    default: return measure_block(Joined{g, at}, n);
  }
}

__global__ void __launch_bounds__(kSpanThreads, 8)
    measure_kernel(const MeasureTable __grid_constant__ table, Statistics* __restrict__ spans,
                   int64_t* __restrict__ first_span) {
  __shared__ Statistics blocks[kSpanBlocks];
  if (blockIdx.x == 0)  // where each tensor's spans begin, for the kernel that adds them
    for (int t = threadIdx.x; t <= table.count; t += kSpanThreads)
      first_span[table.first_index + t] = table.chunk_offset + table.first_chunk[t];
  if (int(blockIdx.x) >= table.first_chunk[table.count]) return;  // nothing but empty tensors

  const Chunk chunk = find_chunk(table, int(kSpan));
  const Span g = {table.data[0][chunk.slot], Format(table.tag[chunk.slot]),
                  table.data[1][chunk.slot]};
  const int block = int(threadIdx.x) / kTeam, left = chunk.size - block * kBlock;
  const int n = left < 0 ? 0 : left < kBlock ? left : kBlock;
  const Statistics s = measure_block(g, n > 0 ? chunk.begin + block * kBlock : 0, n);
  add_blocks(blocks, s, chunk.size, spans + table.chunk_offset + blockIdx.x);
}

// The 32-lane sum of core/reduce.h, a warp's share of it; valid in the warp's first thread.
__device__ Statistics combine_warp(const Statistics* parts, int64_t count) {
  Statistics s = {};
  for (int64_t i = threadIdx.x % kSumLanes; i < count; i += kSumLanes) add_to(s, parts[i]);
  for (int d = kSumLanes / 2; d > 0; d /= 2) {
    const Statistics other = {__shfl_down_sync(kWarp, s.sum_squares, d),
                              __shfl_down_sync(kWarp, s.max_abs, d),
                              __shfl_down_sync(kWarp, s.non_finite, d)};
    add_to(s, other);
  }
  return s;
}

// One block: a warp per tensor, then the first warp adds the tensors.
__global__ void __launch_bounds__(kCombineThreads, 1)
    combine_kernel(const Statistics* __restrict__ spans, const int64_t* __restrict__ first_span,
                   int64_t count, Statistics* tensors) {
  const int warp = threadIdx.x / kSumLanes, lane = threadIdx.x % kSumLanes;
  for (int64_t t = warp; t < count; t += kCombineThreads / kSumLanes) {
    const int64_t first = first_span[t];
    const Statistics s = combine_warp(spans + first, first_span[t + 1] - first);
    if (lane == 0) tensors[t] = s;
  }
  __syncthreads();
  if (warp != 0) return;
  const Statistics total = combine_warp(tensors, count);
  if (lane == 0) tensors[count] = total;
}

}  // namespace

const char* measure(const Reading* readings, int64_t count, Statistics* spans, int64_t* first_span,
                    Statistics* tensors, void* stream) {
  static thread_local MeasureTable table;  // 32 KB: too much for some stacks
  const auto queue = static_cast<cudaStream_t>(stream);
  int64_t chunks = 0;
  for (int64_t i = 0; i < count;) {
    table.begin(i, chunks);
    for (; i < count && !table.full(); ++i) {
      table.data[0][table.count] = readings[i].data.data;
      table.data[1][table.count] = readings[i].data.rest;
      table.tag[table.count] = uint32_t(readings[i].data.format);
      table.add(readings[i].size, int(kSpan));
    }
    chunks += table.blocks();
    const int blocks = table.blocks() > 0 ? table.blocks() : 1;
    if (const char* error =
            message(launch(measure_kernel, blocks, kSpanThreads, queue, table, spans, first_span)))
      return error;
  }
  return combine(spans, first_span, count, tensors, stream);
}

const char* combine(const Statistics* spans, const int64_t* first_span, int64_t count,
                    Statistics* tensors, void* stream) {
  return message(launch(combine_kernel, 1, kCombineThreads, static_cast<cudaStream_t>(stream),
                        spans, first_span, count, tensors));
}

}  // namespace amp_mp::cuda
