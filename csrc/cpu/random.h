#pragma once
// core/random.h for a whole tile: several draws at once, in vectors. Included once for each
// instruction set.
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
#else
  return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
}

// a and b interleaved: `low` gets the first half of the result, `high` the second.
AMP_MP_BOTH void zip(Wide a, Wide b, Wide& low, Wide& high) {
#if defined(__AVX512F__)
  low = __builtin_shuffle(a, b, Wide{0, 8, 1, 9, 2, 10, 3, 11});
  high = __builtin_shuffle(a, b, Wide{4, 12, 5, 13, 6, 14, 7, 15});
#elif defined(__AVX2__)
  low = __builtin_shuffle(a, b, Wide{0, 4, 1, 5});
  high = __builtin_shuffle(a, b, Wide{2, 6, 3, 7});
#else
  low = __builtin_shuffle(a, b, Wide{0, 2});
  high = __builtin_shuffle(a, b, Wide{1, 3});
#endif
}

// Elements that are drawn for at a time: with fewer than four vectors of draws in flight the
// multiplication's latency halves the speed.
constexpr int kDrawnElements = 4 * 8 * kDraw;
static_assert(kDrawnElements % kTile == 0);

// Random bytes for kDrawnElements elements, from draw `index` on.
AMP_MP_OWN void draw_many(const RandomStream& s, uint64_t index, uint8_t* bytes) {
  constexpr int kBatch = 4;
  Wide lane;
  for (int j = 0; j < kDrawLanes; ++j) lane[j] = uint64_t(j);
  const Wide zero = {}, low = zero + 0xFFFFFFFFu;
  for (int i = 0; i < kDrawnElements / kDraw; i += kDrawLanes * kBatch) {
    Wide c0[kBatch], c1[kBatch], c2[kBatch], c3[kBatch];
    for (int k = 0; k < kBatch; ++k) {
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
      for (int k = 0; k < kBatch; ++k) {
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
    for (int k = 0; k < kBatch; ++k) {
      const Wide x = (c0[k] & low) | (c1[k] << 32), y = (c2[k] & low) | (c3[k] << 32);
      Wide first, second;
      zip(x, y, first, second);
      uint8_t* out = bytes + (i + k * kDrawLanes) * kDraw;
      memcpy(out, &first, sizeof first);
      memcpy(out + sizeof first, &second, sizeof second);
    }
  }
}

// Random bytes of the kDrawnElements elements from `element` on, at bytes[element % kDraw].
AMP_MP_OWN void draw_window(const RandomStream& stream, uint64_t element, uint8_t* bytes) {
  draw_many(stream, element / kDraw, bytes);
  if (element % kDraw == 0) return;
  uint32_t word[4];  // the window ends in the middle of another draw
  draw(stream, element / kDraw + kDrawnElements / kDraw, word);
  memcpy(bytes + kDrawnElements, word, sizeof word);
}

// The random bytes of a tensor's elements, drawn for a window at a time. An element's bytes are
// those of its place in the whole tensor: sharding does not change them. This class is for shards
// without gaps, whose `first` element is known.
class Bytes {
 public:
  AMP_MP_BOTH Bytes(const RandomStream& stream, const Origin& origin)
      : stream_(stream), first_(origin.first) {}

  // Bytes of elements [at, at + kTile). `at` is a multiple of kTile; calls go upwards.
  AMP_MP_BOTH const uint8_t* of(int64_t at) {
    if (at < begin_ || at + kTile > begin_ + kDrawnElements) {
      begin_ = at;
      draw_window(stream_, uint64_t(first_ + at), bytes_);
    }
    return bytes_ + (first_ + begin_) % kDraw + (at - begin_);
  }

 private:
  RandomStream stream_;
  int64_t first_, begin_ = int64_t(1) << 62;
  alignas(64) uint8_t bytes_[kDrawnElements + kDraw];
};

// The same for any shard, also one that has gaps between its rows in the whole tensor. A class of
// its own: the test for rows would cost the steps of small tensors a tenth.
class RowBytes {
 public:
  // `origin` is referred to, and must outlive this object.
  AMP_MP_BOTH RowBytes(const RandomStream& stream, const Origin& origin)
      : stream_(stream), origin_(origin) {}

  AMP_MP_BOTH const uint8_t* of(int64_t at) {
    collect(at, tile_);
    return tile_;
  }

 private:
  // A short piece of a row that the window does not have is drawn by itself: a window would be
  // drawn for every row.
  AMP_MP_OWN void collect(int64_t at, uint8_t* tile) {
    constexpr int64_t kShort = kTile / 2;
    const bool gaps = origin_.row_length > 0;
    int64_t column = gaps ? at % origin_.row_length : 0,
            row = origin_.first + (gaps ? at / origin_.row_length * origin_.row_stride : at);
    for (int64_t n = kTile; n > 0;) {
      const int64_t left = gaps ? origin_.row_length - column : n, piece = n < left ? n : left,
                    place = row + column;
      const bool held = place >= begin_ && place + piece <= begin_ + kDrawnElements;
      if (!held && piece < kShort) {
        draw_few(uint64_t(place), int(piece), tile);
      } else {
        if (!held) draw_window(stream_, uint64_t(begin_ = place), window_);
        memcpy(tile, window_ + begin_ % kDraw + (place - begin_), size_t(piece));
      }
      tile += piece;
      n -= piece;
      column = 0;
      row += origin_.row_stride;
    }
  }

  AMP_MP_BOTH void draw_few(uint64_t place, int n, uint8_t* bytes) const {
    for (int k = 0; k < n;) {
      uint32_t word[4];
      draw(stream_, place / kDraw, word);
      const int begin = int(place % kDraw), most = n - k < kDraw - begin ? n - k : kDraw - begin;
      memcpy(bytes + k, reinterpret_cast<const uint8_t*>(word) + begin, size_t(most));
      k += most;
      place += uint64_t(most);
    }
  }

  RandomStream stream_;
  const Origin& origin_;
  int64_t begin_ = int64_t(1) << 62;  // of the window, in the whole tensor
  alignas(64) uint8_t window_[kDrawnElements + kDraw];
  uint8_t tile_[kTile];
};

}  // namespace
}  // namespace amp_mp::cpu
