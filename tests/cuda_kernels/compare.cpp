// The library's CUDA kernels against its CPU loops, bit for bit, for every rule, format and kind of
// list. Built with the stand-in for CUDA, so it needs no GPU.
//
// Usage: compare full|quick. Prints what ran; exits 1 if anything differs.
#include <cstdio>

#include "cuda/passes.h"
#include "cuda/slots.h"
#include "model.h"

namespace {

int failures = 0;

void expect(bool holds, const char* what, const char* detail, size_t where) {
  if (holds) return;
  if (failures++ < 20) std::fprintf(stderr, "FAILED %s, %s, tensor %zu\n", what, detail, where);
}

bool same(const Statistics& a, const Statistics& b) { return !std::memcmp(&a, &b, sizeof a); }

std::vector<Statistics> measure_both(const std::vector<Reading>& readings, const char* name) {
  const auto count = int64_t(readings.size()), spans = cpu::count_spans(readings.data(), count);
  std::vector<Statistics> wanted(count + 1), found(count + 1), parts(spans), device_parts(spans);
  std::vector<int64_t> first(count + 1);
  cpu::measure(readings.data(), count, parts.data(), wanted.data(), 1);
  const char* error = cuda::measure(readings.data(), count, device_parts.data(), first.data(),
                                    found.data(), nullptr);
  expect(!error, "measure is launched", name, 0);
  for (size_t t = 0; t < wanted.size(); ++t) expect(same(wanted[t], found[t]), "measure", name, t);
  return found;
}

struct Rule {
  const char* name;
  int states, squares;
  bool needs_norms, needs_update_norm;
  void (*on_cpu)(const std::vector<Slot>&, const std::vector<Hyper>&, double, const Measured&);
  const char* (*on_cuda)(const std::vector<Slot>&, const std::vector<Hyper>&, const Verdict&,
                         const Measured&);
};

template <class R>
constexpr Rule rule_of(const char* name) {
  return {name,
          R::kStates,
          R::kSquares,
          needs_norms<R>,
          needs_update_norm<R>,
          [](const std::vector<Slot>& slots, const std::vector<Hyper>& hypers, double multiplier,
             const Measured& measured) {
            std::vector<R> rules(slots.size());
            cpu::apply<R>(slots.data(), int64_t(slots.size()), hypers.data(), multiplier,
                          rules.data(), measured, 1);
          },
          [](const std::vector<Slot>& slots, const std::vector<Hyper>& hypers,
             const Verdict& verdict, const Measured& measured) {
            std::vector<R> rules(slots.size());
            return cuda::apply<R>(slots.data(), int64_t(slots.size()), hypers.data(), &verdict,
                                  rules.data(), measured, nullptr);
          }};
}

#define AMP_MP_RULE(R, op) rule_of<R>(#R),
constexpr Rule kRules[] = {AMP_MP_FOR_EACH_RULE(AMP_MP_RULE)};

// What a rule is told, with its scratch.
struct Norms {
  std::vector<Statistics> spans, updates;
  std::vector<int64_t> first;
  Measured measured;

  Norms(const Rule& rule, const std::vector<Slot>& slots, const std::vector<Statistics>& grads,
        const std::vector<Statistics>& masters) {
    if (!rule.needs_norms) return;
    measured.grads = grads.data();
    measured.weights = masters.data();
    if (!rule.needs_update_norm) return;
    int64_t room = 0;
    for (const Slot& s : slots) room += ceil_divide(s.size, kSpan);
    spans.resize(room);
    updates.resize(slots.size() + 1);
    first.resize(slots.size() + 1);
    measured.update_spans = spans.data();
    measured.updates = updates.data();
    measured.first_span = first.data();
  }
};

void step_both(const Rule& rule, const Shape& shape, bool bad = false) {
  const Model before(shape, bad, rule.states, rule.squares);
  Model wanted = before, found = before;
  const std::vector<Statistics> grads = measure_both(before.readings(kGrad), rule.name);
  std::vector<Statistics> masters;
  if (rule.needs_norms) masters = measure_both(before.readings(kMaster), rule.name);
  const float scale = 1024;
  const Verdict host = decide(&grads.back(), &scale, nullptr, 1.0);
  Verdict verdict = {};
  cuda::decide(&grads.back(), &scale, nullptr, 1.0, &verdict, nullptr);
  expect(!std::memcmp(&host, &verdict, sizeof host), "decide", rule.name, 0);
  expect((verdict.found_inf != 0) == bad, "overflow is found", rule.name, 0);

  const std::vector<Slot> slots = wanted.slots(), device_slots = found.slots();
  const std::vector<Hyper> hypers = before.hypers();
  const Norms norms(rule, slots, grads, masters), device_norms(rule, slots, grads, masters);
  if (!bad) rule.on_cpu(slots, hypers, host.multiplier, norms.measured);
  const char* error = rule.on_cuda(device_slots, hypers, verdict, device_norms.measured);
  expect(!error, "apply is launched", rule.name, 0);
  size_t moved = 0, may_stay = 0;  // large weights may not move in float32
  for (size_t t = 0; t < slots.size(); ++t) {
    const Tensor& f = found.tensors[t];
    expect(f.same(wanted.tensors[t]), bad ? "a skipped step" : "apply", rule.name, t);
    const Array& master = f.arrays[kMaster];
    if (bad || master.n < 64 || master.format != F::float32) continue;
    ++(master.same(before.tensors[t].arrays[kMaster]) ? may_stay : moved);
  }
  expect(moved >= 3 * may_stay, "apply moves weights", rule.name, may_stay);
  for (size_t t = 0; !bad && t < norms.updates.size(); ++t)
    expect(same(norms.updates[t], device_norms.updates[t]), "norm of the update", rule.name, t);
  std::printf("%s: %zu tensors, %s\n", rule.name, slots.size(), bad ? "overflow" : "applied");
}

constexpr double kFactor = 2e4;  // takes some numbers beyond float16

// Pairs of arrays to copy between; those of one format are one array, multiplied in place.
struct Pairs {
  std::vector<Array> to, from;

  Pairs(const std::vector<size_t>& sizes, size_t count, unsigned seed) {
    std::mt19937 random(seed);
    for (size_t p = 0; p < count; ++p) {
      const Format target = Format(p % kFormats), source = Format(p / kFormats % kFormats);
      size_t n = sizes[p % sizes.size()];
      if (target == F::m8 || source == F::m8) n = to_groups(n);
      const auto shift = [&] { return random() % 4 == 0 ? 1 + random() % 7 : 0; };
      to.emplace_back(n, target, shift(), shift());
      from.emplace_back(n, source, shift(), shift());
      if (random() % 2) {
        from[p].fill_with_any_bits(random);
      } else {
        from[p].fill(numbers(n, p, 3.0f, source == F::float16_root || source == F::ue8m8), true);
      }
    }
  }

  std::vector<Transfer> transfers() const {
    std::vector<Transfer> list;
    for (size_t p = 0; p < to.size(); ++p) {
      const bool in_place = to[p].format == from[p].format;
      const Stream stream = stream_of(p * 0x123456789ABCDEFu, double(p), uint32_t(7 * p), p % 2);
      list.push_back({int64_t(to[p].n), in_place ? from[p].span() : to[p].span(), from[p].span(),
                      p % 5 < 2, stream});
    }
    return list;
  }

  void expect_same(const Pairs& other, const char* what) const {
    for (size_t p = 0; p < to.size(); ++p)
      expect(to[p].same(other.to[p]) && from[p].same(other.from[p]), what,
             kFormatNames[int(to[p].format)], p);
  }
};

void copy_both(const std::vector<size_t>& sizes, size_t count) {
  const Pairs before(sizes, count, 3), wanted = before, found = before;
  const Verdict overflow = {1, 1, 0, 0, 1}, half = {0, 0.5, 0, 0, 1};
  const std::vector<Transfer> transfers = found.transfers();
  cuda::copy(transfers.data(), int64_t(count), &overflow, 1.0, nullptr);
  found.expect_same(before, "a skipped copy");
  cpu::copy(wanted.transfers().data(), int64_t(count), kFactor, 1);
  cuda::copy(transfers.data(), int64_t(count), nullptr, kFactor, nullptr);
  found.expect_same(wanted, "copy to");
  cpu::copy(wanted.transfers().data(), int64_t(count), 0.5, 1);
  cuda::copy(transfers.data(), int64_t(count), &half, 1.0, nullptr);
  found.expect_same(wanted, "copy with a verdict to");
  std::printf("copy: %zu tensors\n", count);
}

template <class Scale>
void scale_both(const Scale& start, const char* name) {
  std::vector<double> host(sizeof start / sizeof(double)), device;
  std::memcpy(host.data(), &start, sizeof start);
  device = host;
  std::mt19937 random(1);
  std::normal_distribution<double> exponent(-6, 2);
  for (int i = 0; i < 300; ++i) {
    const float found_inf = random() % 9 == 0 ? 2 : 0;  // two devices saw it
    const double max_abs = random() % 50 == 0 ? 0 : std::exp2(exponent(random));
    update_scale(host.data(), found_inf != 0, max_abs);
    cuda::update_scale(device.data(), &found_inf, &max_abs, nullptr);
    expect(host == device, "scale", name, size_t(i));
  }
  expect(host[1] != start.scale, "the scale moves", name, 0);
}

void scales_both() {
  scale_both(BackoffScale{1, 65536, 1, 16777216, 2, 5, 0, -1}, "Backoff");
  scale_both(HysteresisScale{2, 65536, 1, 16777216, 2, .5, 5, 2, 0, 0, 2}, "hysteresis, Apex");
  scale_both(HysteresisScale{2, 65536, 1, 16777216, 2, .5, 5, 2, 1, 0, 2}, "hysteresis, Megatron");
  scale_both(LogMaxScale{3, 1, 1e-9, 16777216, 16, .99, .999, 3.09, 0, 0, 0, 1, 1}, "LogMax");
  scale_both(AdaptiveScale{4, 1000, 1, 16777216, 1000}, "adaptive");
}

// `count` sizes in which `cycle` repeats; where the moments may be in m8, whole groups.
Shape repeated(const std::vector<size_t>& cycle, size_t count, int per_group, size_t offset = 0) {
  Shape shape = {{}, per_group, offset};
  for (size_t t = 0; t < count; ++t) {
    const size_t n = cycle[t % cycle.size()];
    shape.sizes.push_back((t + offset) % 5 == 0 ? to_groups(n) : n);
  }
  return shape;
}

const std::vector<size_t> kEdges = {1, 8, 0, 257, 31, 2049, 64, 9, 4097, 256, 700, 7, 513};
const std::vector<size_t> kTiny = {3, 0, 9, 1, 8, 33, 0, 5};
const std::vector<size_t> kRagged = {
    0,  1,    7,  8,  9,     0,     63,    64, 65, 4095, 4096,  4097, 16383, 16384, 16385, 3,
    49, 2049, 15, 17, 65535, 65536, 65537, 31, 0,  33,   70001, 2,    12320, 100,   65568};

// Lists of all lengths at which a launch begins or ends.
void lengths_of_lists(const Rule& rule, bool quick) {
  constexpr int capacity = cuda::SlotTable::kCapacity;
  const std::vector<int> all = {0, 1, 35, 36, 37, capacity - 1, capacity, capacity + 1};
  for (int count : quick ? std::vector{0, capacity + 1} : all)
    step_both(rule, repeated(kTiny, count, 100));
  step_both(rule, repeated({33}, 40, 1));  // more groups than a launch takes
  step_both(rule, {{0, 0, 0}, 1});
  step_both(rule, {{0, 0, 5, 0, 40, 0, 0}, 3});
}

void lengths_of_copies(bool quick) {
  constexpr int capacity = cuda::Table<4, 0, Stream>::kCapacity;
  copy_both(kTiny, 0);
  copy_both(kTiny, capacity + 1);
  for (int count = capacity - 1; !quick && count <= capacity; ++count) copy_both(kTiny, count);
}

void lengths_of_readings(bool quick) {
  constexpr int capacity = cuda::Table<2>::kCapacity;
  for (int count : {0, capacity - 1, capacity, capacity + 1}) {
    if (quick && count != capacity + 1) continue;
    const Model model(repeated(kTiny, count, 100), false, 0, -1);
    std::vector<Reading> readings = model.readings(kMaster);
    readings.resize(count);  // the gaps made it longer
    measure_both(readings, "of many");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && !std::strcmp(argv[1], "quick");
  for (size_t r = 0; r < std::size(kRules); ++r) {
    const Rule& rule = kRules[r];
    const bool shown = !std::strcmp(rule.name, "AdamW") || rule.needs_update_norm;
    step_both(rule, repeated(kEdges, quick ? 66 : kAllPairs, 17, 66 * r));
    if (shown) lengths_of_lists(rule, quick);
    if (quick && !shown) continue;
    step_both(rule, repeated(kTiny, 37, 5, 37 * r), true);
    step_both(rule, {kRagged, 2, 35 * r});
  }
  copy_both(kEdges, kFormats * kFormats);
  copy_both(kRagged, quick ? kRagged.size() : 5 * kFormats);
  lengths_of_copies(quick);
  lengths_of_readings(quick);
  scales_both();
  std::printf(failures ? "%d failures\n" : "all equal\n", failures);
  return failures != 0;
}
