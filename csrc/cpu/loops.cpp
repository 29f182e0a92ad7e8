// The inner loops that know no rule, compiled once for each instruction set: AMP_MP_ISA is the
// namespace and the name, the compiler's flags say which instructions it may use. Plain loops that
// the compiler vectorises.
//
// No functions of std (<type_traits> has none), and every inline function is always_inline: an
// out-of-line copy would be a weak symbol, and the linker could keep the AVX-512 copy for all
// instruction sets.
#include "cpu/average.h"
#include "cpu/changes.h"
#include "cpu/float8.h"
#include "cpu/kernels.h"
#include "cpu/measure.h"
#include "cpu/norm.h"
#include "cpu/random.h"

namespace amp_mp::cpu::AMP_MP_ISA {
namespace {

template <class T>
AMP_MP_BOTH Statistics measure_span(const T* x, int64_t n) {
  Statistics total = {};
  for (int64_t i = 0; i < n; i += kBlock)
    add_to(total, measure_block(x + i, int(n - i < kBlock ? n - i : kBlock)));
  return total;
}

Statistics measure(const Reading& r, int64_t begin, int64_t end) {
  switch (r.data.format) {
    case Format::float16:
      return measure_span(static_cast<const float16*>(r.data.data) + begin, end - begin);
    case Format::bfloat16:
      return measure_span(static_cast<const bfloat16*>(r.data.data) + begin, end - begin);
    case Format::float32:
      return measure_span(static_cast<const float*>(r.data.data) + begin, end - begin);
    default: break;
  }
  Statistics total = {};  // split masters
  alignas(64) float block[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int n = int(end - i < kBlock ? end - i : kBlock);
    for (int k = 0; k < n; k += kTile)
      decode_tile(r.data, i + k, block + k, n - k < kTile ? n - k : kTile);
    add_to(total, measure_block(block, n));
  }
  return total;
}

void copy(const Transfer& t, int64_t begin, int64_t end, float multiplier) {
  alignas(64) float x[kTile], y[kTile];
  const bool is_whole = t.to.format == Format::float32;
  const bool clamp = t.saturate && t.to.format == Format::float16;
  const bool random = is_stochastic(t.to.format);
  RowBytes bytes(t.random, t.origin);
  for (int64_t i = begin; i < end; i += kTile) {
    const int n = int(end - i < kTile ? end - i : kTile);
    const float* from = open_tile(t.from, i, x, n);
    float* to = is_whole ? at_element<float>(t.to.data, i) : y;
    // In place has a loop of its own: beside another array the compiler asks whether they overlap.
    if (from == to)
      for (int k = 0; k < n; ++k) to[k] *= multiplier;
    else
      for (int k = 0; k < n; ++k) to[k] = from[k] * multiplier;
    if (is_whole) continue;
    if (clamp)
      for (int k = 0; k < n; ++k) y[k] = saturate(y[k]);
    encode_tile(y, t.to, i, random ? bytes.of(i, n) : nullptr, n);
  }
}

void compare(const Comparison& c, int64_t begin, int64_t end) {
  alignas(64) uint16_t old[kTile], now[kTile];
  PartialSums sums;
  for (int64_t i = begin; i < end; i += kTile) {
    const int n = int(end - i < kTile ? end - i : kTile);
    const uint16_t* after = numbers_of(c.after, c.changes.format, i, now, n);
    if (c.before.data)
      compare_tile<true>(c.changes.bits() + i / 8,
                         numbers_of(c.before, c.changes.format, i, old, n), after, i / kTile, n,
                         sums);
    else
      compare_tile<false>(nullptr, nullptr, after, i / kTile, n, sums);
  }
  add_to(c.changes.sum, sums);
}

int64_t count_bits(const Changes& changes, int64_t begin, int64_t end) {
  int64_t bits = 0;
  for (int64_t i = begin; i < end; i += kWord)
    bits += __builtin_popcountll(changes.words()[i / kWord]);
  return bits;
}

void look(const Watched& w, int64_t begin, int64_t end) {
  alignas(64) uint16_t made[kTile];
  PartialSums sums;
  for (int64_t i = begin; i < end; i += kTile) {
    const int n = int(end - i < kTile ? end - i : kTile);
    const uint16_t* now = numbers_of(w.weights, w.changes.format, i, made, n);
    compare_tile<false>(nullptr, nullptr, now, i / kTile, n, sums);
  }
  add_to(&w.found->sum, sums);
}

void gather(const Gathering& g, int64_t begin, int64_t end, int64_t first, int64_t count) {
  if (g.wide)
    gather_as<int64_t>(g, begin, end, first, count);
  else
    gather_as<int32_t>(g, begin, end, first, count);
}

// As torch's addcmul_ adds: with a fused multiply-add where the processor has one.
void adapt(float* __restrict grad, const float* __restrict weight, int64_t n, float inverse,
           float decay, float ratio) {
  const uint32_t mask = decay != 0 ? 0xFFFFFFFFu : 0u;  // as add_decay has it
  for (int64_t i = 0; i < n; ++i) {
    const float w = from_bits(to_bits(weight[i]) & mask);
#ifdef FP_FAST_FMAF
    grad[i] = __builtin_fmaf(w, decay, grad[i] * inverse) * ratio;
#else
    grad[i] = (grad[i] * inverse + w * decay) * ratio;
#endif
  }
}

}  // namespace

#define AMP_MP_NAME2(isa) #isa
#define AMP_MP_NAME(isa) AMP_MP_NAME2(isa)

// Of multiply.cpp.
void multiply(const Product& product, int64_t begin, int64_t end);
void widen_transposed(const Transposed& transposed);
void round_transposed(const Transposed& transposed);

extern const Kernels table;
const Kernels table = {AMP_MP_NAME(AMP_MP_ISA),
                       measure,
                       copy,
                       average,
                       compare,
                       count_bits,
                       look,
                       gather,
                       multiply,
                       widen_transposed,
                       round_transposed,
                       norm,
                       norm_gradients,
                       adapt,
                       float8};

}  // namespace amp_mp::cpu::AMP_MP_ISA
