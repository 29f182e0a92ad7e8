#pragma once
// Weights as float8 for samplers: codes of 8 bits (e4m3fn) with one scale for each block.
//
// The largest finite magnitude of a block is amax. Its scale is amax / 448 in float32, at least
// 2^-126, or the power of two from there up. A code is weight / scale, a float32 quotient, rounded
// to nearest even; it saturates at 448. NaN and inf become the code of NaN with their sign.
#include "core/formats.h"

namespace amp_mp {

constexpr int kFloat8Block = 128;  // rows and columns of a block
constexpr int kFloat8Group = 32;   // columns of a block of MXFP8, which has one row
constexpr float kFloat8Max = 448.0f;
constexpr uint32_t kFloat8Nan = 0x7Fu, kFloat8Most = 0x7Eu;  // codes; that of 448

enum class Float8Pass { whole, amax, scales, codes };

// Matrices one behind the other. Those of a shard may begin within a block: its first row is row
// `first_row` of the first block, its first column column `first_column`.
struct Float8 {
  Float8Pass pass;  // amax: weights to amax; scales: amax to scales; codes: by these scales
  bool is_power;    // scales are powers of two, as E8M0 bytes; else float32
  bool is_mx;       // blocks of one row and 32 columns: `whole` alone
  Format format;    // float32, float16 or bfloat16
  const void* weights;
  uint8_t* codes;
  float* amax;   // of each block
  void* scales;  // of each block
  int64_t matrices, rows, columns;
  int32_t first_row, first_column;

  AMP_MP_BOTH static int64_t blocks_of(int64_t first, int64_t size) {
    return size == 0 ? 0 : (first + size + kFloat8Block - 1) / kFloat8Block;
  }
  AMP_MP_BOTH int64_t blocks_down() const { return blocks_of(first_row, rows); }
  AMP_MP_BOTH int64_t blocks_across() const { return blocks_of(first_column, columns); }
  AMP_MP_BOTH int64_t blocks() const {
    return is_mx ? matrices * rows * columns / kFloat8Group
                 : matrices * blocks_down() * blocks_across();
  }
};

// The part of a block that there is: rows and columns of one matrix.
struct Float8Part {
  int64_t row, column;  // the first
  int rows, columns;
  int64_t first_weight;  // the matrix's

  AMP_MP_BOTH static Float8Part of(const Float8& f, int64_t block) {
    const int64_t across = f.blocks_across(), down = f.blocks_down();
    const int64_t line = block / across, matrix = line / down;
    Float8Part part = {};
    cut((line - matrix * down) * kFloat8Block - f.first_row, f.rows, part.row, part.rows);
    cut((block - line * across) * kFloat8Block - f.first_column, f.columns, part.column,
        part.columns);
    part.first_weight = matrix * f.rows * f.columns;
    return part;
  }

  AMP_MP_BOTH int64_t at(const Float8& f, int row_of_part) const {
    return first_weight + (row + row_of_part) * f.columns + column;
  }

 private:
  AMP_MP_BOTH static void cut(int64_t begin, int64_t size, int64_t& first, int& length) {
    const int64_t end = begin + kFloat8Block < size ? begin + kFloat8Block : size;
    first = begin > 0 ? begin : 0;
    length = int(end - first);
  }
};

// Bits of 16-bit weights and of float32 ones are signed here, so that SSE2 has their maximum.
template <class Bits>
AMP_MP_BOTH Bits finite_magnitude(Bits bits, Bits infinity) {
  const Bits magnitude = Bits(bits & (sizeof(Bits) == 2 ? 0x7FFF : 0x7FFFFFFF));
  return magnitude < infinity ? magnitude : Bits(0);
}

// The exponent of the power of two from x up, as E8M0; x is at least 2^-126.
AMP_MP_BOTH uint8_t power_above(float x) { return uint8_t((to_bits(x) + 0x7FFFFFu) >> 23); }
AMP_MP_BOTH float power_of(uint8_t e8m0) { return from_bits(uint32_t(e8m0) << 23); }

// The scale of a block.
AMP_MP_BOTH float scale_of(const Float8& f, float amax) {
  const float quotient = amax / kFloat8Max, scale = quotient > 0x1p-126f ? quotient : 0x1p-126f;
  return f.is_power ? power_of(power_above(scale)) : scale;
}

AMP_MP_BOTH void put_scale(const Float8& f, int64_t block, float scale) {
  if (f.is_power)
    static_cast<uint8_t*>(f.scales)[block] = power_above(scale);
  else
    static_cast<float*>(f.scales)[block] = scale;
}

AMP_MP_BOTH float get_scale(const Float8& f, int64_t block) {
  return f.is_power ? power_of(static_cast<const uint8_t*>(f.scales)[block])
                    : static_cast<const float*>(f.scales)[block];
}

// Divides weights by a scale. Below 2^-64 both are multiplied by 2^64 first: weights may be
// subnormal there, and an operation on these would make zeros of them after
// torch.set_flush_denormal(True). Above, a subnormal weight's code is 0 anyhow.
template <bool kPower, bool kSmall>
struct Float8Quotient {
  float scale;
  // 2^-6, below which the steps between codes stay the same. As a constant GCC would make a branch
  // of the comparison with it, and loops would stay scalar.
  uint32_t least;

  static AMP_MP_BOTH Float8Quotient by(float scale) {
    const uint32_t zero = to_bits(scale) >> 31;
    if (kSmall) scale = from_bits(to_bits(scale) + (64u << 23));
    // A power's inverse is exact: only the sign of its exponent is another.
    return {kPower ? from_bits((254u << 23) - to_bits(scale)) : scale, (121u << 23) + zero};
  }

  AMP_MP_BOTH float operator()(uint32_t magnitude) const {
    float x = from_bits(magnitude);
    if (kSmall) {
      const float subnormal = from_bits(magnitude + (65u << 23)) - from_bits(65u << 23);
      x = select(magnitude < (1u << 23), subnormal, from_bits(magnitude + (64u << 23)));
    }
    return kPower ? x * scale : x / scale;
  }
};

AMP_MP_BOTH bool is_small_scale(float scale) { return scale < 0x1p-64f; }

template <class Quotient>
AMP_MP_BOTH uint32_t float8_code(float weight, const Quotient& by) {
  const uint32_t bits = to_bits(weight), magnitude = bits & kMagnitude;
  const uint32_t x = to_bits(by(magnitude));
  const uint32_t power = (x > by.least ? x : by.least) & kInfinity;
  // The sum of x and 2^20 times its power of two has an ulp of one step: it rounds, and its lowest
  // bits count the steps.
  const uint32_t added = power + (20u << 23);
  const uint32_t steps = to_bits(from_bits(x) + from_bits(added)) - added;
  const uint32_t rounded = steps + (power >> 20) - (121u << 3);
  const uint32_t code = rounded < kFloat8Most ? rounded : kFloat8Most;  // any, if it is not finite
  // By a shift of the sign, for the same reason: all ones, or 0.
  const auto not_finite = uint32_t(int32_t(kInfinity - 1 - magnitude) >> 31);
  return code | (kFloat8Nan & not_finite) | ((bits >> 24) & 0x80u);
}

}  // namespace amp_mp
