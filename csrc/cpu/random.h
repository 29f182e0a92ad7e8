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

// The random bytes of a tensor's elements, drawn for a window at a time. An element's bytes are
// those of its place in the whole tensor: sharding does not change them.
class Bytes {
 public:
  // `origin` is referred to, and must outlive this object. A copy would cost 16 ns a parameter: the
  // compiler then puts the whole Slot on the stack, and reads it in other pieces than it wrote.
  AMP_MP_BOTH Bytes(const RandomStream& stream, const Origin& origin)
      : stream_(stream), origin_(origin) {}

  // Bytes of elements [at, at + kTile). `at` is a multiple of kTile; calls go upwards.
  AMP_MP_BOTH const uint8_t* of(int64_t at) {
    if (origin_.row_length > 0) {
      collect(stream_, origin_, at, row_begin_, bytes_, tile_);
      return tile_;
    }
    const int64_t place = origin_.first + at;
    if (!holds(begin_, place, kTile)) {
      begin_ = place;
      fill(stream_, uint64_t(place), bytes_);
    }
    return bytes_ + begin_ % kDraw + (place - begin_);
  }

 private:
  // Whether a window that begins at `begin` has the bytes of n elements of the whole tensor.
  AMP_MP_BOTH static bool holds(int64_t begin, int64_t place, int64_t n) {
    return place >= begin && place + n <= begin + kDrawnElements;
  }

  // Fills `tile` with the bytes of a shard that has gaps between its rows, from element `at` on. A
  // short piece of a row that the window does not have is drawn by itself: a window would be drawn
  // for every row. A static function with a window's begin of its own, because what a function out
  // of line may change has to be in memory, and the other path would be slower.
  AMP_MP_OWN static void collect(RandomStream stream, const Origin& origin, int64_t at,
                                 int64_t& begin, uint8_t* window, uint8_t* tile) {
    constexpr int64_t kShort = kTile / 2;
    int64_t column = at % origin.row_length,
            row = origin.first + at / origin.row_length * origin.row_stride;
    for (int64_t n = kTile; n > 0;) {
      const int64_t left = origin.row_length - column, piece = n < left ? n : left,
                    place = row + column;
      const bool held = holds(begin, place, piece);
      if (!held && piece < kShort) {
        draw_few(stream, uint64_t(place), int(piece), tile);
      } else {
        if (!held) fill(stream, uint64_t(begin = place), window);
        memcpy(tile, window + begin % kDraw + (place - begin), size_t(piece));
      }
      tile += piece;
      n -= piece;
      column = 0;
      row += origin.row_stride;
    }
  }

  AMP_MP_OWN static void draw_few(const RandomStream& stream, uint64_t place, int n,
                                  uint8_t* bytes) {
    for (int k = 0; k < n;) {
      uint32_t word[4];
      draw(stream, place / kDraw, word);
      const int begin = int(place % kDraw), most = n - k < kDraw - begin ? n - k : kDraw - begin;
      memcpy(bytes + k, reinterpret_cast<const uint8_t*>(word) + begin, size_t(most));
      k += most;
      place += uint64_t(most);
    }
  }

  AMP_MP_OWN static void fill(const RandomStream& stream, uint64_t element, uint8_t* bytes) {
    draw_many(stream, element / kDraw, bytes);
    if (element % kDraw == 0) return;
    uint32_t word[4];  // the window ends in the middle of another draw
    draw(stream, element / kDraw + kDrawnElements / kDraw, word);
    memcpy(bytes + kDrawnElements, word, sizeof word);
  }

  RandomStream stream_;
  const Origin& origin_;
  // Where the window begins in the whole tensor, of a contiguous shard and of rows.
  int64_t begin_ = int64_t(1) << 62, row_begin_ = int64_t(1) << 62;
  alignas(64) uint8_t bytes_[kDrawnElements + kDraw];
  uint8_t tile_[kTile];
};

}  // namespace
}  // namespace amp_mp::cpu
