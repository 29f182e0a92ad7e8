// The inner loops, one source compiled for several instruction sets: AMP_MP_ISA is the namespace
// and the name, the flags say what the compiler may use. Nothing here but plain loops it
// vectorises.
//
// No std containers, no other inline functions than always_inline ones: their out-of-line copies
// are weak symbols, and the linker could give the AVX-512 one to everybody.
#include "cpu/convert.h"
#include "cpu/kernels.h"
#include "cpu/measure.h"

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
    default: return measure_span(static_cast<const float*>(r.data.data) + begin, end - begin);
  }
}

void copy(const Transfer& t, int64_t begin, int64_t end, float multiplier) {
  alignas(64) float x[kTile];
  const bool clamp = t.saturate && t.to.format == Format::float16;
  for (int64_t i = begin; i < end; i += kTile) {
    const int n = int(end - i < kTile ? end - i : kTile);
    decode_tile(t.from, i, x, n);
    for (int k = 0; k < n; ++k) x[k] *= multiplier;
    if (clamp)
      for (int k = 0; k < n; ++k) x[k] = saturate(x[k]);
    encode_tile(x, t.to, i, n);
  }
}

// restrict on every pointer and the constants in a local copy: float members seen through a
// reference could be what the stores change, and the loop would stay scalar.
template <class Rule>
AMP_MP_BOTH void update(const Rule rule, float multiplier, const float* __restrict g,
                        float* __restrict w, float* __restrict s0, float* __restrict s1, int n) {
  if constexpr (Rule::kStates == 0) {
    for (int i = 0; i < n; ++i) rule(g[i] * multiplier, w[i]);
  } else if constexpr (Rule::kStates == 1) {
    for (int i = 0; i < n; ++i) rule(g[i] * multiplier, w[i], s0[i]);
  } else {
    for (int i = 0; i < n; ++i) rule(g[i] * multiplier, w[i], s0[i], s1[i]);
  }
}

// The elements as float32: where they lie if they are, or else decoded into the tile.
AMP_MP_BOTH float* open_tile(Span from, int64_t at, float* tile, int n) {
  if (from.format == Format::float32) return static_cast<float*>(from.data) + at;
  decode_tile(from, at, tile, n);
  return tile;
}

template <class Rule>
void apply(const Slot& slot, int64_t begin, int64_t end, const Rule& rule, float multiplier) {
  alignas(64) float tile[kTile], master[kTile], state[kMaxStates][kTile];
  for (int64_t i = begin; i < end; i += kTile) {
    const int n = int(end - i < kTile ? end - i : kTile);
    const float* g = open_tile(slot.grad, i, tile, n);
    float* w = open_tile(slot.master, i, master, n);
    float* s[kMaxStates] = {};
    for (int k = 0; k < Rule::kStates; ++k) s[k] = open_tile(slot.state[k], i, state[k], n);
    update(rule, multiplier, g, w, s[0], s[1], n);
    if (slot.weight.data) store_tile(w, slot.weight, i, tile, n);
    if (w == master) store_tile(w, slot.master, i, tile, n);
    for (int k = 0; k < Rule::kStates; ++k)
      if (s[k] == state[k]) store_tile(s[k], slot.state[k], i, tile, n);
  }
}

}  // namespace

#define AMP_MP_NAME2(isa) #isa
#define AMP_MP_NAME(isa) AMP_MP_NAME2(isa)
#define AMP_MP_APPLY(Rule, op) apply<Rule>,

extern const Kernels table;
const Kernels table = {AMP_MP_NAME(AMP_MP_ISA), measure, copy, AMP_MP_FOR_EACH_RULE(AMP_MP_APPLY)};

}  // namespace amp_mp::cpu::AMP_MP_ISA
