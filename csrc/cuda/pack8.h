#pragma once
// A thread's eight elements, read and written 16 bytes at a time if the addresses are aligned, and
// their random bytes.
#include "core/formats.h"
#include "cuda/gpu.h"
#include "plan.h"

namespace amp_mp::cuda {

constexpr int kPack = 8;
constexpr unsigned kWarp = 0xFFFFFFFFu;

// A thread's elements are those from its first on, at most eight; below, `n` counts all up to the
// end of the chunk: 8 or more where it has eight, and 0 or less where it has none. Clamping n to 0
// to 8 and asking whether that is 8 would be wrong: ptxas 13.0 makes both one instruction of sm_90
// (VIMNMX.RELU with a predicate), which finds 8 for an n of 0.
__device__ __forceinline__ bool has_eight(int n) { return n >= kPack; }

__device__ __forceinline__ bool is_wide(const void* p) {
  return (reinterpret_cast<uintptr_t>(p) & 15) == 0;
}

template <class T>
__device__ __forceinline__ void load(T (&out)[kPack], const T* p, int n, bool wide) {
  if (wide) {
    uint4 raw[sizeof out / 16];
    for (int i = 0; i < int(sizeof out / 16); ++i) raw[i] = reinterpret_cast<const uint4*>(p)[i];
    memcpy(out, raw, sizeof out);
  } else {
    // A constant trip count: a dynamic one puts `out` in local memory.
    for (int k = 0; k < kPack; ++k)
      if (k < n) out[k] = p[k];
  }
}

// Adds a multiple of 64, below 256, to each byte of x: bits 0 to 5 stay, and no carry leaves a
// byte.
__device__ __forceinline__ uint32_t add_to_bytes(uint32_t x, uint32_t added) {
  const uint32_t each = added * 0x01010101u;
  return x ^ each ^ (x & each & 0x40404040u) << 1;
}

// The random bytes of elements e to e + 7, that of element e in the lowest byte; e is a multiple of
// 8, so that one draw has all of them and the same is added to each.
__device__ __forceinline__ uint64_t random_eight(const RandomStream& stream, uint64_t e) {
  const RandomPlace place = RandomPlace::of(e);
  uint32_t word[4];
  draw(stream, place.draw, word);
  const bool second = place.byte >= kPack;
  const uint32_t low = add_to_bytes(second ? word[2] : word[0], place.added),
                 high = add_to_bytes(second ? word[3] : word[1], place.added);
  return low | uint64_t(high) << 32;
}

// The same for any e, since a shard may begin anywhere.
__device__ __forceinline__ uint64_t random_bytes(const RandomStream& stream, uint64_t e) {
  const int shift = 8 * int(e % kPack);
  const uint64_t first = random_eight(stream, e / kPack * kPack);
  if (shift == 0) return first;
  return first >> shift | random_eight(stream, (e / kPack + 1) * kPack) << (64 - shift);
}

// The rows of a shard as a kernel argument: core/random.h's Origin without its beginning.
struct Rows {
  int64_t length = 0, stride = 0;  // length 0: no gaps
  double inverse = 0;              // 1 / length

  static Rows of(const Origin& o) {
    if (o.row_length == 0) return {};
    return {o.row_length, o.row_stride, 1.0 / double(o.row_length)};
  }
};

// Index in the whole tensor of element `at` of a shard whose element 0 is element `first`. The
// quotient is a product of doubles, because a division of 64-bit integers is a function call. Below
// 2^51 elements it is right or one too small.
__device__ __forceinline__ int64_t place_of(int64_t first, const Rows& rows, int64_t at) {
  if (rows.length == 0) return first + at;
  int64_t number = int64_t(double(at) * rows.inverse);
  if (at - number * rows.length >= rows.length) ++number;
  return first + at + number * (rows.stride - rows.length);
}

// The random bytes of elements at to at + 7 of the shard, `at` being a multiple of 8.
__device__ __forceinline__ uint64_t random_bytes(const RandomStream& stream, int64_t first,
                                                 const Rows& rows, int64_t at) {
  if (rows.length % kPack == 0)  // the eight lie in one row
    return random_bytes(stream, uint64_t(place_of(first, rows, at)));
  uint64_t bytes = 0;
  for (int k = 0; k < kPack; ++k) {
    const RandomPlace place = RandomPlace::of(uint64_t(place_of(first, rows, at + k)));
    uint32_t word[4];
    draw(stream, place.draw, word);
    const uint32_t w = place.byte / 4, shift = 8 * (place.byte % 4);
    const uint32_t low = w & 1 ? word[1] : word[0], high = w & 1 ? word[3] : word[2];
    bytes |= uint64_t((((w & 2 ? high : low) >> shift) + place.added) & 0xFFu) << (8 * k);
  }
  return bytes;
}

// Picks bytes of two words in one instruction. A digit of the selector names a byte: 0 to 3 of a, 4
// to 7 of b.
__device__ __forceinline__ uint32_t upper_halves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x7632);
}
__device__ __forceinline__ uint32_t lower_halves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x5410);
}
__device__ __forceinline__ uint32_t bytes_0(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return lower_halves(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040));
}
__device__ __forceinline__ uint32_t bytes_1(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return lower_halves(__byte_perm(a, b, 0x0051), __byte_perm(c, d, 0x0051));
}

// noise_of random byte k of eight, in one instruction.
__device__ __forceinline__ uint32_t noise_at(uint64_t random, int k) {
  const auto half = uint32_t(k < 4 ? random : random >> 32);
  return __byte_perm(half, 0x80u, 0x5504u | uint32_t(k % 4) << 4);
}

// Eight elements of 1, 2 or 4 bytes as they lie in memory, packed from the lowest bits on.
struct Pack8 {
  uint32_t word[kPack];

  __device__ __forceinline__ uint32_t byte(int k) const { return word[k / 4] >> (8 * (k % 4)); }
  __device__ __forceinline__ uint32_t half(int k) const { return word[k / 2] >> (16 * (k % 2)); }
  __device__ __forceinline__ void set_byte(int k, uint32_t x) {
    word[k / 4] |= (x & 0xFFu) << (8 * (k % 4));
  }
  // Packs the upper halves, the lower halves, bytes 0 or bytes 1 of eight words.
  __device__ __forceinline__ void set_upper(const uint32_t (&x)[kPack]) {
    for (int k = 0; k < kPack; k += 2) word[k / 2] = upper_halves(x[k], x[k + 1]);
  }
  __device__ __forceinline__ void set_lower(const uint32_t (&x)[kPack]) {
    for (int k = 0; k < kPack; k += 2) word[k / 2] = lower_halves(x[k], x[k + 1]);
  }
  __device__ __forceinline__ void set_bytes_0(const uint32_t (&x)[kPack]) {
    for (int k = 0; k < kPack; k += 4) word[k / 4] = bytes_0(x[k], x[k + 1], x[k + 2], x[k + 3]);
  }
  __device__ __forceinline__ void set_bytes_1(const uint32_t (&x)[kPack]) {
    for (int k = 0; k < kPack; k += 4) word[k / 4] = bytes_1(x[k], x[k + 1], x[k + 2], x[k + 3]);
  }
  __device__ __forceinline__ void set_half(int k, uint32_t x) {
    word[k / 2] |= (x & 0xFFFFu) << (16 * (k % 2));
  }
};

// Reads a thread's elements of `width` bytes; a width of 0 means that there is no array. `whole`:
// there are eight and the address is aligned, so that they can be read at once.
//
// A load into a register that another load fills, even under the opposite condition, waits for it.
// So each width has registers of its own here, which are joined afterwards. `kNarrow`: the width
// may be 1; joining waits for the load, and arrays without such formats shall not.
template <bool kNarrow>
__device__ __forceinline__ Pack8 read(const void* data, int64_t at, int width, int n, bool whole) {
  Pack8 p = {};
  const char* from = static_cast<const char*>(data) + at * width;
  if (whole) {
    uint2 narrow = {};
    uint4 piece = {};
    if (kNarrow && width == 1) narrow = *reinterpret_cast<const uint2*>(from);
    if (width >= 2) piece = *reinterpret_cast<const uint4*>(from);
    if (width == 4) {
      const uint4 upper = reinterpret_cast<const uint4*>(from)[1];
      memcpy(p.word + 4, &upper, sizeof upper);
    }
    p.word[0] = kNarrow && width == 1 ? narrow.x : piece.x;
    p.word[1] = kNarrow && width == 1 ? narrow.y : piece.y;
    p.word[2] = piece.z;
    p.word[3] = piece.w;
    return p;
  }
  // One kind of load for each loop: a test of the width within it would make each load a branch
  // that is waited for. The number of turns is constant, or p lies in local memory.
  uint32_t x[kPack] = {};
  if (width == 4) {
    for (int k = 0; k < kPack; ++k)
      if (k < n) x[k] = reinterpret_cast<const uint32_t*>(from)[k];
    for (int k = 0; k < kPack; ++k) p.word[k] = x[k];
  } else if (width == 2) {
    for (int k = 0; k < kPack; ++k)
      if (k < n) x[k] = reinterpret_cast<const uint16_t*>(from)[k];
    p.set_lower(x);
  } else if (kNarrow && width == 1) {
    for (int k = 0; k < kPack; ++k)
      if (k < n) x[k] = reinterpret_cast<const uint8_t*>(from)[k];
    p.set_bytes_0(x);
  }
  return p;
}

// A thread's eight elements of half a byte, as a word; `at` and n are even.
__device__ __forceinline__ uint32_t read_nibbles(const void* data, int64_t at, int n, bool whole) {
  const uint8_t* from = static_cast<const uint8_t*>(data) + at / kPacked;
  if (whole) return *reinterpret_cast<const uint32_t*>(from);
  // A loop of few registers: four loads at once would have AMSGrad's kernel spill one.
  uint32_t word = 0;
  for (int k = (has_eight(n) ? kPack : n) / kPacked - 1; k >= 0; --k) word = word << 8 | from[k];
  return word;
}

__device__ __forceinline__ void write_nibbles(void* data, uint32_t word, int64_t at, int n,
                                              bool whole) {
  uint8_t* to = static_cast<uint8_t*>(data) + at / kPacked;
  if (whole) {
    *reinterpret_cast<uint32_t*>(to) = word;
    return;
  }
  for (int k = 0; k < kPack / kPacked; ++k)
    if (kPacked * k < n) to[k] = uint8_t(word >> (8 * k));
}

__device__ __forceinline__ void write(void* data, const Pack8& p, int64_t at, int width, int n,
                                      bool whole) {
  char* to = static_cast<char*>(data) + at * width;
  if (whole) {
    if (width == 1) {
      *reinterpret_cast<uint2*>(to) = {p.word[0], p.word[1]};
      return;
    }
    if (width == 0) return;
    *reinterpret_cast<uint4*>(to) = {p.word[0], p.word[1], p.word[2], p.word[3]};
    if (width == 4) {
      reinterpret_cast<uint4*>(to)[1] = {p.word[4], p.word[5], p.word[6], p.word[7]};
    }
    return;
  }
  if (width == 4) {
    for (int k = 0; k < kPack; ++k)
      if (k < n) reinterpret_cast<uint32_t*>(to)[k] = p.word[k];
  } else if (width == 2) {
    for (int k = 0; k < kPack; ++k)
      if (k < n) reinterpret_cast<uint16_t*>(to)[k] = uint16_t(p.half(k));
  } else if (width == 1) {
    for (int k = 0; k < kPack; ++k)
      if (k < n) reinterpret_cast<uint8_t*>(to)[k] = uint8_t(p.byte(k));
  }
}

}  // namespace amp_mp::cuda
