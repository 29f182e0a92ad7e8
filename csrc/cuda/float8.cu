// Weights as float8: a block of threads holds a block of 128 x 128 weights in its registers, finds
// the largest and encodes, so that weights are read once. Those that a shard cuts are read twice:
// once for the largest, once to encode.
#include "core/float8.h"

#include "cuda/pack8.h"
#include "cuda/passes.h"
#include "cuda/tensor_table.h"

namespace amp_mp::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPacksAcross = kFloat8Block / kPack;  // threads beside each other
constexpr int kRowsAtOnce = kThreads / kPacksAcross;
constexpr int kPacks = kFloat8Block / kRowsAtOnce;  // of a thread
constexpr int kGroupPacks = 4;                      // of a thread, of MXFP8
constexpr int kLanesOfGroup = kFloat8Group / kPack;

// Element k of eight in 16 bits or, if kWide, in float32.
template <bool kWide>
__device__ __forceinline__ uint32_t bits_of(const Pack8& held, int k) {
  return kWide ? held.word[k] : held.half(k) & 0xFFFFu;
}

template <bool kWide>
__device__ __forceinline__ float value_of(uint32_t bits, Format format) {
  if (kWide) return from_bits(bits);
  return format == Format::bfloat16 ? decode(bfloat16{uint16_t(bits)})
                                    : decode(float16{uint16_t(bits)});
}

// The larger of `largest` and the finite magnitudes of eight weights, as bits of the format.
template <bool kWide>
__device__ __forceinline__ int32_t largest_of(const Pack8& held, Format format, int32_t largest) {
  const int32_t infinity = kWide                        ? int32_t(kInfinity)
                           : format == Format::bfloat16 ? 0x7F80
                                                        : 0x7C00;
  for (int k = 0; k < kPack; ++k) {
    const auto bits = int32_t(bits_of<kWide>(held, k) & (kWide ? ~0u : 0x7FFFu));
    const int32_t m = finite_magnitude(bits, infinity);
    largest = m > largest ? m : largest;
  }
  return largest;
}

template <bool kWide, class Quotient>
__device__ __forceinline__ Pack8 codes_of(const Pack8& held, Format format, const Quotient& by) {
  uint32_t code[kPack];
  for (int k = 0; k < kPack; ++k)
    code[k] = float8_code(value_of<kWide>(bits_of<kWide>(held, k), format), by);
  Pack8 codes = {};
  codes.set_bytes_0(code);
  return codes;
}

// The largest of a block of threads, in all of them.
__device__ __forceinline__ int32_t largest_of_block(int32_t largest) {
  __shared__ int32_t of_warp[kThreads / 32];
  for (int d = 16; d > 0; d /= 2) {
    const int32_t other = __shfl_xor_sync(kWarp, largest, d);
    largest = other > largest ? other : largest;
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
  for (int w = 0; w < kThreads / 32; ++w) largest = of_warp[w] > largest ? of_warp[w] : largest;
  return largest;
}

// A thread's packs of a block: rows kRowsAtOnce apart.
struct OwnPacks {
  Float8Part part;
  int column, n;  // of the part; how many elements from there to the end of a row
  bool whole;

  static __device__ __forceinline__ OwnPacks of(const Float8& f, int64_t block) {
    OwnPacks own;
    own.part = Float8Part::of(f, block);
    own.column = int(threadIdx.x) % kPacksAcross * kPack;
    own.n = own.part.columns - own.column;
    own.whole = has_eight(own.n) && is_wide(f.weights) && is_wide(f.codes) &&
                f.columns % kPack == 0 && own.part.column % kPack == 0;
    return own;
  }
  __device__ __forceinline__ int row(int pack) const {
    return int(threadIdx.x) / kPacksAcross + pack * kRowsAtOnce;
  }
  __device__ __forceinline__ int count(int pack) const { return row(pack) < part.rows ? n : 0; }
};

template <bool kWide, class Quotient>
__device__ __forceinline__ void write_codes(const Float8& f, const OwnPacks& own,
                                            const Pack8 (&held)[kPacks], float scale) {
  const auto by = Quotient::by(scale);
  AMP_MP_UNROLL
  for (int j = 0; j < kPacks; ++j) {
    const int n = own.count(j);
    write(f.codes, codes_of<kWide>(held[j], f.format, by), own.part.at(f, own.row(j)) + own.column,
          1, n, own.whole && has_eight(n));
  }
}

template <bool kWide>
__global__ void __launch_bounds__(kThreads, 2) float8_kernel(const Float8 f) {
  const int64_t block = blockIdx.x;
  const OwnPacks own = OwnPacks::of(f, block);
  Pack8 held[kPacks];
  AMP_MP_UNROLL
  for (int j = 0; j < kPacks; ++j) {
    const int n = own.count(j);
    held[j] = read<false>(f.weights, own.part.at(f, own.row(j)) + own.column, kWide ? 4 : 2, n,
                          own.whole && has_eight(n));
  }
  float scale;
  if (f.pass == Float8Pass::codes) {
    scale = get_scale(f, block);
  } else {
    int32_t largest = 0;
    AMP_MP_UNROLL
    for (int j = 0; j < kPacks; ++j) largest = largest_of<kWide>(held[j], f.format, largest);
    const float amax = value_of<kWide>(uint32_t(largest_of_block(largest)), f.format);
    if (f.pass == Float8Pass::amax) {
      if (threadIdx.x == 0) f.amax[block] = amax;
      return;
    }
    scale = scale_of(f, amax);
    if (threadIdx.x == 0) put_scale(f, block, scale);
  }
  if (is_small_scale(scale))
    write_codes<kWide, Float8Quotient<false, true>>(f, own, held, scale);
  else if (f.is_power)
    write_codes<kWide, Float8Quotient<true, false>>(f, own, held, scale);
  else
    write_codes<kWide, Float8Quotient<false, false>>(f, own, held, scale);
}

template <bool kWide>
__global__ void __launch_bounds__(kThreads, 4) mxfp8_kernel(const Float8 f) {
  const int64_t size = f.blocks() * kFloat8Group;
  const bool wide = is_wide(f.weights) && is_wide(f.codes);
  for (int j = 0; j < kGroupPacks; ++j) {
    const int64_t at = ((int64_t(blockIdx.x) * kGroupPacks + j) * kThreads + threadIdx.x) * kPack;
    const int n = at < size ? kPack : 0;  // groups are whole, so a thread has all or none
    const bool whole = wide && has_eight(n);
    const Pack8 held = read<false>(f.weights, at, kWide ? 4 : 2, n, whole);
    int32_t largest = largest_of<kWide>(held, f.format, 0);
    for (int d = kLanesOfGroup / 2; d > 0; d /= 2) {
      const int32_t other = __shfl_xor_sync(kWarp, largest, d);
      largest = other > largest ? other : largest;
    }
    const float scale = scale_of(f, value_of<kWide>(uint32_t(largest), f.format));
    if (n > 0 && threadIdx.x % kLanesOfGroup == 0) put_scale(f, at / kFloat8Group, scale);
    using Small = Float8Quotient<true, true>;
    using Usual = Float8Quotient<true, false>;
    const Pack8 codes = is_small_scale(scale) ? codes_of<kWide>(held, f.format, Small::by(scale))
                                              : codes_of<kWide>(held, f.format, Usual::by(scale));
    write(f.codes, codes, at, 1, n, whole);
  }
}

__global__ void __launch_bounds__(kThreads) float8_scales_kernel(const Float8 f) {
  const int64_t block = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (block < f.blocks()) put_scale(f, block, scale_of(f, f.amax[block]));
}

}  // namespace

const char* float8(const Float8& f, void* stream) {
  const auto queue = static_cast<cudaStream_t>(stream);
  const int64_t blocks = f.blocks();
  const bool wide = f.format == Format::float32;
  if (blocks == 0) return nullptr;
  if (f.pass == Float8Pass::scales)
    return message(launch(float8_scales_kernel, ceil_divide(blocks, kThreads), kThreads, queue, f));
  if (!f.is_mx)
    return message(
        launch(wide ? float8_kernel<true> : float8_kernel<false>, blocks, kThreads, queue, f));
  const int64_t grid = ceil_divide(blocks * kFloat8Group, kThreads * kGroupPacks * kPack);
  return message(launch(wide ? mxfp8_kernel<true> : mxfp8_kernel<false>, grid, kThreads, queue, f));
}

}  // namespace amp_mp::cuda
