#pragma once
// Notes which weights a thread block changes (core/changes.h). A warp has one tile of 256, of which
// each thread has eight, and so a byte of the bits.
#include "core/changes.h"
#include "cuda/pack8.h"

namespace amp_mp::cuda {

static_assert(32 * kPack == kChangesTile);

// The bits of a float32 rounded as core/changes.h's `compared`, but for the payload of a NaN, of
// two.
__device__ __forceinline__ uint32_t compared_two(float low, float high, Format as) {
  if (as == Format::bfloat16) return upper_halves(round_bfloat16(low), round_bfloat16(high));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800  // 7.5 has no such instruction
  uint32_t two;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
  return two;
#else
  return compared(low, as) | uint32_t(compared(high, as)) << 16;
#endif
}

// The numbers by which a thread's eight weights are compared, two in a word; 0 for those that are
// not there.
struct Numbers {
  uint32_t word[kPack / 2];

  // Those of 16-bit weights that are at hand.
  static __device__ __forceinline__ Numbers of(const Pack8& weights, int n) {
    Numbers numbers;
    for (int j = 0; j < kPack / 2; ++j)
      numbers.word[j] = weights.word[j] & (n > 2 * j + 1 ? ~0u : n > 2 * j ? 0xFFFFu : 0u);
    return numbers;
  }

  static __device__ __forceinline__ Numbers read(const Array& weights, Format as, int64_t at, int n,
                                                 bool whole) {
    Numbers numbers;
    if (weights.format == Format::float32) {
      const Pack8 held = cuda::read<false>(weights.data, at, 4, n, whole);
      for (int j = 0; j < kPack / 2; ++j)
        numbers.word[j] =
            compared_two(from_bits(held.word[2 * j]), from_bits(held.word[2 * j + 1]), as);
    } else {
      const bool is_second = width_of(weights.format) == 4;
      const Pack8 held =
          cuda::read<false>(is_second ? weights.second : weights.data, at, 2, n, whole);
      for (int j = 0; j < kPack / 2; ++j) numbers.word[j] = held.word[j];
    }
    return numbers;
  }
};

// A thread's eight numbers, each times its coefficient in the tile.
__device__ __forceinline__ uint32_t dot_of(const Numbers& numbers) {
  const int first = int(threadIdx.x) % 32 * kPack;
  uint32_t sum = 0;
  for (int j = 0; j < kPack / 2; ++j) {
    const uint32_t two = numbers.word[j];
    sum += uint32_t(int(int16_t(two)) * coefficient_in_tile(first + 2 * j));
    sum += uint32_t((int(two) >> 16) * coefficient_in_tile(first + 2 * j + 1));
  }
  return sum;
}

// Compares a thread's eight numbers from `at` on and returns what they add to the sum. bits: where
// theirs are to be set; null to set none.
__device__ __forceinline__ uint32_t compare(const Numbers& before, const Numbers& after,
                                            uint8_t* bits, int64_t at) {
  uint32_t changed = 0;
  for (int j = 0; j < kPack / 2; ++j) {
    const uint32_t differ = before.word[j] ^ after.word[j];
    changed |= uint32_t((differ & 0xFFFFu) != 0) << (2 * j);
    changed |= uint32_t(differ >> 16 != 0) << (2 * j + 1);
  }
  if (bits && changed != 0) bits[at / kPack] |= uint8_t(changed);
  return (dot_of(after) - dot_of(before)) * coefficient_of_tile(at / kChangesTile);
}

// Every thread of a warp calls it once, with what its elements add.
__device__ __forceinline__ void add_to_sum(uint64_t* sum, uint32_t added) {
  for (int d = 16; d > 0; d /= 2) added += __shfl_xor_sync(kWarp, added, d);
  if (threadIdx.x % 32 == 0 && added != 0) atomicAdd(reinterpret_cast<uint32_t*>(sum), added);
}

}  // namespace amp_mp::cuda
