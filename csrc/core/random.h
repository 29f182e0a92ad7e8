#pragma once
// Random bits for stochastic rounding: Philox4x32-10 of Salmon et al., "Parallel random numbers: as
// easy as 1, 2, 3" (2011), which computes them from a counter. They depend on seed, step, tensor
// and element alone, so they are the same on every device and replica, after a resume and for any
// sharding; a skipped step uses none.
// Note: Random bits by counter (docs/design.md)
#include <cstdint>

#include "core/macros.h"

namespace amp_mp {

constexpr int kPhiloxRounds = 10;
constexpr uint32_t kPhiloxA = 0xD2511F53u, kPhiloxB = 0xCD9E8D57u;  // multipliers
constexpr uint32_t kWeylA = 0x9E3779B9u, kWeylB = 0xBB67AE85u;  // added to the key in each round
constexpr int kDraw = 16;                                       // bytes of a draw
constexpr int kSharing = 4;                                     // elements that share a byte
constexpr int kSharedBytes = 64;                                // how far apart they lie
constexpr int kRandomBlock = kSharing * kSharedBytes;  // elements for which so many bytes are drawn

// Everything that random bits depend on except the element. Weights have a stream of their own: the
// bits that rounded a moment are correlated with the update that the moment makes.
struct RandomStream {
  uint32_t seed[2], step, tensor, of_weights;
};

AMP_MP_BOTH RandomStream random_stream(uint64_t seed, double step, uint32_t tensor,
                                       bool of_weights) {
  return {
      {uint32_t(seed), uint32_t(seed >> 32)}, uint32_t(step), tensor, of_weights ? 1u << 31 : 0};
}

// Where the elements of a shard are in the whole tensor, for random bits: element e of the shard is
// element first + e / row_length * row_stride + e % row_length of the whole. With row_length 0, as
// for a whole tensor or a shard without gaps, it is element first + e.
struct Origin {
  int64_t first = 0, row_length = 0, row_stride = 0;
  bool operator==(const Origin&) const = default;
};

// A random byte is drawn for four elements: e, e + 64, e + 128 and e + 192 of a block of 256. Each
// of the four adds another multiple of 64 to it. So an element's own byte is uniform, and four
// elements together are spread more evenly than four independent bytes would be. Drawing is the
// dearest part of rounding stochastically on a CPU.
struct RandomPlace {
  uint64_t draw;   // number of the draw that has the byte
  uint32_t byte;   // which of its 16 bytes, counted from the lowest of word 0
  uint32_t added;  // to the byte, modulo 256

  static AMP_MP_BOTH RandomPlace of(uint64_t element) {
    const uint64_t drawn = element / kRandomBlock * kSharedBytes + element % kSharedBytes;
    return {drawn / kDraw, uint32_t(drawn % kDraw),
            uint32_t(element / kSharedBytes % kSharing * (256 / kSharing))};
  }
};

// Draw number `index`, 16 bytes.
AMP_MP_BOTH void draw(const RandomStream& s, uint64_t index, uint32_t (&word)[4]) {
  uint32_t c0 = uint32_t(index), c1 = uint32_t(index >> 32) | s.of_weights, c2 = s.tensor,
           c3 = s.step, a = s.seed[0], b = s.seed[1];
  for (int r = 0; r < kPhiloxRounds; ++r) {
    const uint64_t p = uint64_t(kPhiloxA) * c0, q = uint64_t(kPhiloxB) * c2;
    c0 = uint32_t(q >> 32) ^ c1 ^ a;
    c1 = uint32_t(q);
    c2 = uint32_t(p >> 32) ^ c3 ^ b;
    c3 = uint32_t(p);
    a += kWeylA;
    b += kWeylB;
  }
  word[0] = c0;
  word[1] = c1;
  word[2] = c2;
  word[3] = c3;
}

}  // namespace amp_mp
