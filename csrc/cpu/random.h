#pragma once
// core/random.h for a whole tile: draws in vectors. Included once for each instruction set.
#include "core/random.h"
#include "cpu/convert.h"

namespace amp_mp::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kDrawLanes = 8;
#elif defined(__AVX2__)
constexpr int kDrawLanes = 4;
#else
constexpr int kDrawLanes = 2;
#endif

typedef uint64_t Wide __attribute__((vector_size(8 * kDrawLanes)));

// The 64-bit products of the low halves of each lane. An intrinsic, because compilers turn a
// product of masked 64-bit lanes into three.
AMP_MP_BOTH Wide multiply(Wide a, Wide b) {
#if defined(__AVX512F__)
  return Wide(_mm512_mul_epu32(__m512i(a), __m512i(b)));
#elif defined(__AVX2__)
  return Wide(_mm256_mul_epu32(__m256i(a), __m256i(b)));
#elif defined(__SSE2__)
  return Wide(_mm_mul_epu32(__m128i(a), __m128i(b)));
#elif defined(__aarch64__)  // without it a scalar product for each lane
  return Wide(vmull_u32(vmovn_u64(uint64x2_t(a)), vmovn_u64(uint64x2_t(b))));
#else
  return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
}

// The lanes that `order` names, a's before b's. By reference, because passing wide vectors depends
// on the instruction set.
template <class Lanes>
AMP_MP_BOTH void shuffle(const Lanes& a, const Lanes& b, const Lanes& order, Lanes& result) {
#if defined(__clang__)  // its shuffle takes constants, which these are where this is inlined
  constexpr size_t kLanes = sizeof(Lanes) / sizeof(a[0]);
  for (size_t j = 0; j < kLanes; ++j)
    result[j] = order[j] < kLanes ? a[order[j]] : b[order[j] - kLanes];
#else
  result = __builtin_shuffle(a, b, order);
#endif
}

// a and b interleaved: `low` gets the first half of the result, `high` the second.
AMP_MP_BOTH void zip(Wide a, Wide b, Wide& low, Wide& high) {
#if defined(__AVX512F__)
  shuffle(a, b, Wide{0, 8, 1, 9, 2, 10, 3, 11}, low);
  shuffle(a, b, Wide{4, 12, 5, 13, 6, 14, 7, 15}, high);
#elif defined(__AVX2__)
  shuffle(a, b, Wide{0, 4, 1, 5}, low);
  shuffle(a, b, Wide{2, 6, 3, 7}, high);
#else
  shuffle(a, b, Wide{0, 2}, low);
  shuffle(a, b, Wide{1, 3}, high);
#endif
}

// Bytes that are drawn at a time: with fewer than four vectors of draws in flight the
// multiplication's latency halves the speed.
constexpr int kWindowBytes = 4 * 8 * kDraw;
constexpr int kWindowBlocks = kWindowBytes / kSharedBytes;  // of kRandomBlock elements each

// kWindowBytes bytes, from draw `index` on.
AMP_MP_OWN void draw_many(const RandomStream& s, uint64_t index, uint8_t* bytes) {
  constexpr int kVectors = 4;
  Wide lane;
  for (int j = 0; j < kDrawLanes; ++j) lane[j] = uint64_t(j);
  const Wide zero = {}, low = zero + 0xFFFFFFFFu;
  for (int i = 0; i < kWindowBytes / kDraw; i += kDrawLanes * kVectors) {
    Wide c0[kVectors], c1[kVectors], c2[kVectors], c3[kVectors];
    for (int k = 0; k < kVectors; ++k) {
      const Wide n = lane + (index + uint64_t(i + k * kDrawLanes));
      c0[k] = n & low;
      c1[k] = (n >> 32) | uint64_t(s.of_weights);
      c2[k] = zero + s.tensor;
      c3[k] = zero + s.step;
    }
    uint32_t a = s.seed[0], b = s.seed[1];
#pragma GCC unroll 10
    for (int r = 0; r < kPhiloxRounds; ++r) {
#pragma GCC unroll 4
      for (int k = 0; k < kVectors; ++k) {
        // The upper halves of c1 and c3 are not cleared: no product reads them.
        const Wide p = multiply(c0[k], zero + kPhiloxA), q = multiply(c2[k], zero + kPhiloxB);
        c0[k] = (q >> 32) ^ c1[k] ^ uint64_t(a);
        c1[k] = q;
        c2[k] = (p >> 32) ^ c3[k] ^ uint64_t(b);
        c3[k] = p;
      }
      a += kWeylA;
      b += kWeylB;
    }
    for (int k = 0; k < kVectors; ++k) {
      const Wide x = (c0[k] & low) | (c1[k] << 32), y = (c2[k] & low) | (c3[k] << 32);
      Wide first, second;
      zip(x, y, first, second);
      uint8_t* out = bytes + (i + k * kDrawLanes) * kDraw;
      memcpy(out, &first, sizeof first);
      memcpy(out + sizeof first, &second, sizeof second);
    }
  }
}

// The bytes of kWindowBlocks blocks of elements, from a block's number on.
struct Window {
  int64_t block = int64_t(1) << 62;
  alignas(64) uint8_t bytes[kWindowBytes];

  // Whether it holds the bytes of blocks [first, last].
  AMP_MP_BOTH bool holds(int64_t first, int64_t last) const {
    return first >= block && last < block + kWindowBlocks;
  }
  AMP_MP_BOTH void draw_from(const RandomStream& stream, int64_t first) {
    block = first;
    draw_many(stream, uint64_t(first) * (kSharedBytes / kDraw), bytes);
  }
};

// The random bytes of a block's elements, from the kSharedBytes drawn for it (core/random.h).
AMP_MP_BOTH void share(const uint8_t* __restrict drawn, uint8_t* __restrict bytes) {
  for (int k = 0; k < kSharing; ++k)
    for (int i = 0; i < kSharedBytes; ++i)
      bytes[k * kSharedBytes + i] = uint8_t(drawn[i] + k * (256 / kSharing));
}

// The random bytes of a tensor's elements. An element's bytes are those of its place in the whole
// tensor: sharding does not change them. This class is for shards without gaps, whose `first`
// element is known.
template <int Tile>
class Bytes {
  static_assert(Tile / kRandomBlock < kWindowBlocks);

 public:
  AMP_MP_BOTH Bytes(const RandomStream& stream, const Origin& origin)
      : stream_(stream), first_(origin.first) {}

  // Bytes of elements [at, at + n), at most Tile. Calls go upwards. Valid until the next call.
  AMP_MP_BOTH const uint8_t* of(int64_t at, int n) {
    const int64_t place = first_ + at, block = place / kRandomBlock, inside = place % kRandomBlock;
    const int blocks = int(ceil_divide(inside + n, kRandomBlock));
    if (!window_.holds(block, block + blocks - 1)) window_.draw_from(stream_, block);
    const uint8_t* drawn = window_.bytes + (block - window_.block) * kSharedBytes;
    for (int k = 0; k < blocks; ++k) share(drawn + k * kSharedBytes, bytes_ + k * kRandomBlock);
    return bytes_ + inside;
  }

 private:
  RandomStream stream_;
  int64_t first_;
  Window window_;
  alignas(64) uint8_t bytes_[Tile + kRandomBlock];
};

// The same for any shard, also one that has gaps between its rows in the whole tensor. A class of
// its own: the test for rows would cost the steps of small tensors a tenth.
class RowBytes {
 public:
  // `origin` is referred to, and must outlive this object.
  AMP_MP_BOTH RowBytes(const RandomStream& stream, const Origin& origin)
      : stream_(stream), origin_(origin) {}

  // Bytes of elements [at, at + n), at most kTile. Valid until the next call.
  AMP_MP_BOTH const uint8_t* of(int64_t at, int n) {
    collect(at, n, tile_);
    return tile_;
  }

 private:
  // A short piece of a row that the window does not have is drawn by itself: a window would be
  // drawn for every row.
  AMP_MP_OWN void collect(int64_t at, int64_t n, uint8_t* tile) {
    constexpr int64_t kShort = kTile / 2;
    const bool gaps = origin_.row_length > 0;
    int64_t column = gaps ? at % origin_.row_length : 0,
            row = origin_.first + (gaps ? at / origin_.row_length * origin_.row_stride : at);
    while (n > 0) {
      const int64_t left = gaps ? origin_.row_length - column : n, piece = n < left ? n : left,
                    place = row + column, last = (place + piece - 1) / kRandomBlock;
      const bool held = window_.holds(place / kRandomBlock, last);
      if (!held && piece >= kShort) window_.draw_from(stream_, place / kRandomBlock);
      copy(place, int(piece), tile, held || piece >= kShort);
      tile += piece;
      n -= piece;
      column = 0;
      row += origin_.row_stride;
    }
  }

  // The bytes of n neighbours, from the window or from draws of their own.
  AMP_MP_BOTH void copy(int64_t place, int n, uint8_t* bytes, bool from_window) const {
    for (int k = 0; k < n;) {
      const RandomPlace at = RandomPlace::of(uint64_t(place + k));
      uint32_t word[4];
      const auto* drawn = reinterpret_cast<const uint8_t*>(word);
      if (from_window) {
        drawn = window_.bytes + int64_t(at.draw) * kDraw - window_.block * kSharedBytes;
      } else {
        draw(stream_, at.draw, word);
      }
      // The window has the bytes of one row of shared bytes side by side, a draw its own.
      const int left = from_window ? kSharedBytes - int((place + k) % kSharedBytes)
                                   : kDraw - int(at.byte),
                most = n - k < left ? n - k : left;
      for (int i = 0; i < most; ++i) bytes[k + i] = uint8_t(drawn[at.byte + i] + at.added);
      k += most;
    }
  }

  RandomStream stream_;
  const Origin& origin_;
  Window window_;
  uint8_t tile_[kTile];
};

}  // namespace
}  // namespace amp_mp::cpu
