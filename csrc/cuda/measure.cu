// The measure pass: sums the squares of gradients in the order of core/reduce.h. A block of threads
// sums one span (cuda/span_threads.h).
#include "cuda/access.h"
#include "cuda/combine.h"
#include "cuda/passes.h"
#include "cuda/span_threads.h"
#include "cuda/tensor_table.h"

namespace amp_mp::cuda {
namespace {

// One pointer for each tensor, or two where some of them are split masters; in two sizes.
template <int Pointers, int Bytes>
using MeasureTable = TensorTable<Pointers, NoExtra, Bytes>;
constexpr int kFewBytes = 448;

// Sources of elements: Plain is one array, Joined a split master. kBatch: rows in flight, to hide
// the memory's latency; with more than one, Joined would need local memory.
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
  Array array;
  int64_t begin;
  __device__ __forceinline__ bool wide() const {
    return is_wide(array.data) && is_wide(array.second) && begin % 16 == 0;
  }
  __device__ __forceinline__ void load(float (&out)[kPack], int at, int n, bool whole) const {
    cuda::load<kMasterFormats>(out, array, begin + at, n, whole);
  }
};

template <class Source>
__device__ __forceinline__ Statistics measure_block(const Source x, int n) {
  using T = typename Source::Raw;
  constexpr int kBatch = Source::kBatch;
  const int lane0 = int(threadIdx.x) % kBlockThreads * kPack;
  const bool wide = x.wide();
  float sum[kPack] = {};
  uint32_t most = 0;  // bits of the largest |x|; NaN is larger than infinity
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
    x.load(raw, row + lane0, left, wide && has_eight(left));
    add(raw);
  }
  double lane[kPack];
  for (int k = 0; k < kPack; ++k) lane[k] = sum[k];
  for (int d = kBlockThreads / 2; d > 0; d /= 2) {
    const uint32_t other = __shfl_xor_sync(kWarp, most, d, kBlockThreads);
    most = other > most ? other : most;
  }
  // All eight threads of the block need the sum, to decide whether it needs care.
  const double total = add_block_lanes(lane);
  Statistics s = {total, from_bits(most), 0};
  const bool care = needs_care(total, s.max_abs, most >= kInfinity);
  if (!__any_sync(kWarp, care)) return s;

  // Rare. The whole warp takes part in the shuffles; blocks that need no care keep their sum.
  double again[kPack] = {};
  float largest = 0;
  uint32_t bad = 0;
  if (care)
    for (int i = lane0; i < n; i += kLanes) {
      T raw[kPack] = {};  // the zeros past the end add nothing
      x.load(raw, i, n - i, wide && has_eight(n - i));
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
  for (int d = kBlockThreads / 2; d > 0; d /= 2) {
    const float other = __shfl_xor_sync(kWarp, largest, d, kBlockThreads);
    largest = other > largest ? other : largest;
    bad += __shfl_xor_sync(kWarp, bad, d, kBlockThreads);
  }
  const double careful = add_block_lanes(again);
  return care ? Statistics{careful, largest, double(bad)} : s;
}

template <bool Splits>
__device__ __forceinline__ Statistics measure_block(Array g, int64_t at, int n) {
  switch (g.format) {
    case Format::float32:
      return measure_block(Plain<float>{static_cast<const float*>(g.data) + at}, n);
    case Format::float16:
    case Format::float16_stochastic:
      return measure_block(Plain<float16>{static_cast<const float16*>(g.data) + at}, n);
    case Format::bfloat16:
    case Format::bfloat16_stochastic:
      return measure_block(Plain<bfloat16>{static_cast<const bfloat16*>(g.data) + at}, n);
    default:
      if constexpr (Splits) return measure_block(Joined{g, at}, n);
      return {};
  }
}

template <int Pointers, int Bytes>
__global__ void __launch_bounds__(kSpanThreads, 8)
    measure_kernel(const MeasureTable<Pointers, Bytes> __grid_constant__ table,
                   Statistics* __restrict__ spans, int64_t* __restrict__ first_span,
                   unsigned* ticket) {
  __shared__ Statistics blocks[kSpanBlocks];
  init_span_sums(table, first_span, ticket);
  if (int(blockIdx.x) >= table.first_chunk[table.count]) return;  // all tensors are empty

  const Chunk chunk = find_chunk(table);
  Array g = {table.data[0][chunk.slot], Format(table.tag(chunk.slot))};
  if constexpr (Pointers > 1) g.second = table.data[1][chunk.slot];
  const int block = int(threadIdx.x) / kBlockThreads, left = chunk.size - block * kBlock;
  const int n = left < 0 ? 0 : left < kBlock ? left : kBlock;
  const Statistics s =
      measure_block < Pointers == 2 > (g, n > 0 ? chunk.begin + block * kBlock : 0, n);
  add_blocks(blocks, s, chunk.size, spans + table.chunk_offset + blockIdx.x);
}

// Combines outside a step.
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(SpanSums sums) {
  __shared__ CombineShared shared;
  if (combine_lists(sums, SpanSums{}, shared)) combine_total(sums, shared);
}

template <int Pointers, int Bytes>
const char* measure_with(const Reading* readings, const SpanSums& sums, cudaStream_t stream) {
  auto& table = table_of_thread<MeasureTable<Pointers, Bytes>>();
  int64_t chunks = 0;
  for (int64_t i = 0; i < sums.count;) {
    table.reset(i, chunks, int(kSpan));
    for (; i < sums.count && !table.full(); ++i) {
      const Array& array = readings[i].data;
      table.data[0][table.count] = array.data;
      if constexpr (Pointers > 1) table.data[1][table.count] = array.second;
      table.add(readings[i].size, uint32_t(array.format));
    }
    chunks += table.blocks();
    const int blocks = table.blocks() > 0 ? table.blocks() : 1;
    if (const char* error =
            message(launch(measure_kernel<Pointers, Bytes>, blocks, kSpanThreads, stream, table,
                           sums.spans, sums.first_span, sums.ticket)))
      return error;
  }
  return nullptr;
}

template <int Pointers>
const char* measure_all(const Reading* readings, const SpanSums& sums, void* stream) {
  const bool few = sums.count <= MeasureTable<Pointers, kFewBytes>::kCapacity;
  return (few ? measure_with<Pointers, kFewBytes>
              : measure_with<Pointers, kArgumentBytes>)(readings, sums,
                                                        static_cast<cudaStream_t>(stream));
}

}  // namespace

const char* measure(const Reading* readings, const SpanSums& sums, void* stream) {
  bool splits = false;
  for (int64_t i = 0; i < sums.count; ++i) splits = splits || is_split(readings[i].data.format);
  return (splits ? measure_all<2> : measure_all<1>)(readings, sums, stream);
}

const char* combine(const SpanSums& sums, void* stream) {
  return message(launch(combine_kernel, combine_blocks(sums, SpanSums{}), kCombineThreads,
                        static_cast<cudaStream_t>(stream), sums));
}

}  // namespace amp_mp::cuda
