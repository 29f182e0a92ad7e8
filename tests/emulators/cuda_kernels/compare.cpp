// The library's CUDA kernels against its CPU loops, bit for bit, for every rule, format and kind of
// list. Built with the stand-in for CUDA, so it needs no GPU.
//
// Usage: compare full|lists|quick [TEXT]. lists: quick, with AdamW on lists of all lengths. Prints
// what ran; exits 1 if anything differs, at once when a failure's text has TEXT in it.
#include "cuda/slot_table.h"
#include "scales.h"

namespace {

struct Rule {
  const char* name;
  int states, squares;
  bool needs_norms, needs_update_norm;
  void (*on_cpu)(const std::vector<Slot>&, const std::vector<Hyper>&, double, const NormInputs&);
  const char* (*on_cuda)(const std::vector<Slot>&, const std::vector<Hyper>&, const DecideInputs*,
                         Verdict*, const cuda::SpanSums&, const cuda::SpanSums&, const NormInputs&);
};

template <class R>
constexpr Rule rule_of(const char* name) {
  return {name,
          R::kStates,
          R::kSquares,
          needs_norms<R>,
          needs_update_norm<R>,
          [](const std::vector<Slot>& slots, const std::vector<Hyper>& hypers, double multiplier,
             const NormInputs& norms) {
            std::vector<R> rules(slots.size());
            cpu::apply<R>(slots.data(), int64_t(slots.size()), hypers.data(), multiplier,
                          rules.data(), norms, 1);
          },
          [](const std::vector<Slot>& slots, const std::vector<Hyper>& hypers,
             const DecideInputs* inputs, Verdict* verdict, const cuda::SpanSums& grads,
             const cuda::SpanSums& weights, const NormInputs& norms) {
            std::vector<SlotRule<R>> slot_rules(slots.size());
            return cuda::apply<R>(slots.data(), int64_t(slots.size()), hypers.data(), inputs,
                                  verdict, grads, weights, slot_rules.data(), norms, nullptr);
          }};
}

#define AMP_MP_RULE(R, op) rule_of<R>(#R),
constexpr Rule kRules[] = {AMP_MP_FOR_EACH_RULE(AMP_MP_RULE)};

// What a rule is told, with its scratch.
struct NormScratch {
  std::vector<Statistics> spans, updates;
  std::vector<int64_t> first;
  unsigned ticket = 7;
  NormInputs inputs;

  NormScratch(const Rule& rule, const std::vector<Slot>& slots, const Statistics* grads,
              const Statistics* masters) {
    if (!rule.needs_norms) return;
    inputs.grads = grads;
    inputs.weights = masters;
    if (!rule.needs_update_norm) return;
    int64_t room = 1;
    for (const Slot& s : slots) room += ceil_divide(s.size, kSpan);
    spans.resize(room);
    updates.resize(slots.size() + 1);
    first.resize(slots.size() + 1);
    inputs.update_spans = spans.data();
    inputs.updates = updates.data();
    inputs.first_span = first.data();
    inputs.ticket = &ticket;
  }
  NormScratch(const NormScratch&) = delete;
};

// One step. `given`: the verdict is made before, as for a second device.
void step_both(const Rule& rule, const Shape& shape, bool bad = false, bool given = false) {
  const Model before(shape, bad, rule.states, rule.squares);
  Model wanted = before, found = before;
  const std::vector<Reading> gradients = before.readings(kGrad),
                             masters = rule.needs_norms ? before.readings(kMaster)
                                                        : std::vector<Reading>();
  const std::vector<Statistics> grads = measure_on_cpu(gradients),
                                weights = measure_on_cpu(masters);
  Measuring device_grads(gradients, rule.name), device_weights(masters, rule.name);

  Outside outside;
  const DecideInputs inputs = outside.decide_inputs();
  const Verdict host = decide(&grads.back(), &outside.scale, nullptr, 1.0);
  Verdict verdict = {};
  if (given) {
    cuda::combine(device_grads.sums, nullptr);
    cuda::decide(&device_grads.tensors.back(), inputs, &verdict, nullptr);
    device_grads.sums.spans = nullptr;
  }
  const std::vector<Slot> slots = wanted.slots(), device_slots = found.slots();
  const std::vector<Hyper> hypers = before.hypers();
  const NormScratch norms(rule, slots, grads.data(), weights.data()),
      device_norms(rule, slots, device_grads.tensors.data(), device_weights.tensors.data());
  if (!bad) rule.on_cpu(slots, hypers, host.multiplier, norms.inputs);
  const char* error =
      rule.on_cuda(device_slots, hypers, given ? nullptr : &inputs, &verdict, device_grads.sums,
                   rule.needs_norms ? device_weights.sums : cuda::SpanSums{}, device_norms.inputs);
  expect(!error, "apply is launched", rule.name, 0);
  expect(!std::memcmp(&host, &verdict, sizeof host), "decide", rule.name, 0);
  expect((verdict.found_inf != 0) == bad, "overflow is found", rule.name, 0);
  expect(outside.count == 1, "one decision", rule.name, size_t(outside.count));
  outside.expect_report(host, bad ? 512 : 2048, rule.name);
  expect(outside.next_scale == (bad ? 512 : 2048) && outside.next_tracker == 0, "scale", rule.name,
         0);
  device_grads.expect_same(grads, rule.name);
  if (rule.needs_norms) device_weights.expect_same(weights, rule.name);
  size_t moved = 0, may_stay = 0;  // large weights may not move in float32
  for (size_t t = 0; t < slots.size(); ++t) {
    const Tensor& f = found.tensors[t];
    expect(f.same(wanted.tensors[t]), bad ? "a skipped step" : "apply", rule.name, t);
    const StoredArray& master = f.arrays[kMaster];
    if (bad || master.n < 64 || master.format != F::float32) continue;
    ++(master.same(before.tensors[t].arrays[kMaster]) ? may_stay : moved);
  }
  expect(moved >= 3 * may_stay, "apply moves weights", rule.name, may_stay);
  for (size_t t = 0; !bad && t < norms.updates.size(); ++t)
    expect(same(norms.updates[t], device_norms.updates[t]), "norm of the update", rule.name, t);
  std::printf("%s: %zu tensors, %s\n", rule.name, slots.size(), bad ? "overflow" : "applied");
}

const std::vector<size_t> kEdges = {1, 8, 0, 257, 31, 2049, 64, 9, 4097, 256, 700, 7, 513};
const std::vector<size_t> kTiny = {3, 0, 9, 1, 8, 33, 0, 5};
const std::vector<size_t> kRagged = {
    0,  1,    7,  8,  9,     0,     63,    64, 65, 4095, 4096,  4097, 16383, 16384, 16385, 3,
    49, 2049, 15, 17, 65535, 65536, 65537, 31, 0,  33,   70001, 2,    12320, 100,   65568};

constexpr double kFactor = 2e4;  // takes some numbers beyond float16

// Pairs of arrays to copy between; those of one format are one array, multiplied in place.
struct Pairs {
  std::vector<StoredArray> to, from;

  Pairs(const std::vector<size_t>& sizes, size_t count, unsigned seed) {
    std::mt19937 random(seed);
    for (size_t p = 0; p < count; ++p) {
      const Format target = Format(p % kFormatCount),
                   source = Format(p / kFormatCount % kFormatCount);
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
      const RandomStream random =
          random_stream(p * 0x123456789ABCDEFu, double(p), uint32_t(7 * p), p % 2);
      list.push_back({int64_t(to[p].n), in_place ? from[p].array() : to[p].array(), from[p].array(),
                      p % 5 < 2, random});
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

// What a CUDA graph replays: one list of pointers for all steps, while gradients, rate and scale
// change where they are. Against a host that does each step anew.
void replays(const Rule& rule, const char* name, std::vector<double> policy, int steps) {
  Model host_model({kEdges, 5}, false, rule.states, rule.squares), device_model = host_model;
  const std::vector<Slot> slots = host_model.slots(), device_slots = device_model.slots();
  const std::vector<Reading> readings = device_model.readings(kGrad);
  std::vector<Hyper> hypers = host_model.hypers(), device_hypers = hypers;
  float rate = 0;
  for (Hyper& h : device_hypers) {
    h.lr = 1e30;
    h.lr_at = &rate;
  }
  std::vector<double> device_policy = policy;
  Outside outside;
  outside.scale = float(policy[1]);
  DecideInputs inputs = outside.decide_inputs();
  inputs.scale_update = in_place(device_policy, outside.scale);
  int skipped = 0;
  for (int step = 0; step < steps; ++step) {
    rate = 1e-3f / float(1 + step);
    for (Hyper& h : hypers) h.lr = double(rate);
    const bool bad = step % 7 == 3;
    const float scale = outside.scale;
    for (Model* model : {&host_model, &device_model})
      for (size_t t = 0; t < model->tensors.size(); ++t) {
        StoredArray& g = model->tensors[t].arrays[kGrad];
        std::vector<float> x = numbers(g.n, 13 * t + 5 * size_t(step), 1e-3f * scale);
        if (bad && t == size_t(step) % 13 && !x.empty()) x.back() = HUGE_VALF;
        g.fill(x, false);
      }
    const std::vector<Statistics> grads = measure_on_cpu(readings);
    const Verdict verdict = decide(&grads.back(), &scale, nullptr, 1.0);
    if (verdict.found_inf == 0) rule.on_cpu(slots, hypers, verdict.multiplier, NormInputs{});
    skipped += verdict.found_inf != 0;
    update_scale_state(policy.data(), verdict.found_inf != 0, verdict.max_abs);

    Measuring measuring(readings, name);
    Verdict found = {};
    rule.on_cuda(device_slots, device_hypers, &inputs, &found, measuring.sums, cuda::SpanSums{},
                 NormInputs{});
    expect(!std::memcmp(&verdict, &found, sizeof found), "a replayed verdict", name, size_t(step));
    expect(device_policy == policy && outside.scale == float(policy[1]), "a replayed scale", name,
           size_t(step));
    outside.expect_report(verdict, float(policy[1]), name);
    for (size_t t = 0; t < slots.size(); ++t)
      expect(device_model.tensors[t].same(host_model.tensors[t]), "a replayed step", name, t);
  }
  expect(skipped >= steps / 8 && skipped < steps / 2, "some steps overflow", name, size_t(skipped));
  expect(outside.count == uint64_t(steps), "steps are counted", name, size_t(outside.count));
  std::printf("%s, %s: %d steps, %d skipped\n", rule.name, name, steps, skipped);
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

// Lists of all lengths at which a launch, of ours or of others, begins or ends, empty tensors
// anywhere.
template <class R>
void lengths_of_lists(const Rule& rule, bool quick) {
  constexpr int capacity = cuda::SlotTable<R>::kCapacity;
  const std::vector<int> all = {0,   1,   2,    35,           36,       37,          319,
                                320, 321, 1500, capacity - 1, capacity, capacity + 1};
  for (int count : quick ? std::vector{0, 1, capacity + 1} : all)
    step_both(rule, repeated(kTiny, count, 100), false, count % 2 == 0);
  step_both(rule, repeated({33}, 40, 1));  // more groups than a launch takes
  step_both(rule, {{0, 0, 0}, 1});
  step_both(rule, {{0, 0, 5, 0, 40, 0, 0}, 3});
}

void lengths_of_copies(bool quick) {
  constexpr int capacity = cuda::TensorTable<4, RandomStream>::kCapacity;
  copy_both(kTiny, 0);
  copy_both(kTiny, capacity + 1);
  for (int count = capacity - 1; !quick && count <= capacity; ++count) copy_both(kTiny, count);
}

void lengths_of_readings(bool quick) {
  constexpr int capacity = cuda::TensorTable<2>::kCapacity;
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
  const auto is = [&](const char* size) { return argc > 1 && !std::strcmp(argv[1], size); };
  if (argc > 2) stop_at = argv[2];
  const bool lists = is("lists"), quick = is("quick") || lists;
  for (size_t r = 0; r < std::size(kRules); ++r) {
    const Rule& rule = kRules[r];
    const bool shown = !std::strcmp(rule.name, "AdamW") || rule.needs_update_norm;
    step_both(rule, repeated(kEdges, quick ? 66 : kAllPairs, 17, 66 * r));
    if (!std::strcmp(rule.name, "AdamW")) lengths_of_lists<AdamW>(rule, quick && !lists);
    if (rule.needs_update_norm) lengths_of_lists<LAMB>(rule, quick);
    if (quick && !shown) continue;
    step_both(rule, repeated(kTiny, 37, 5, 37 * r), true, r % 2 == 1);
    step_both(rule, {kRagged, 2, 35 * r});
  }
  copy_both(kEdges, kFormatCount * kFormatCount);
  copy_both(kRagged, quick ? kRagged.size() : 5 * kFormatCount);
  lengths_of_copies(quick);
  lengths_of_readings(quick);
  combine_both({0, 1, 2, 31, 32, 33, 0, 255, 256, 257, 1023, 1024, 1025, 1281, 15259, 1, 0});
  combine_both({5000});
  std::vector<int64_t> many(1500, 1);
  for (size_t t = 0; t < many.size(); t += 7) many[t] = int64_t(t % 21);
  combine_both(many);
  logarithms();
  for (const auto& [name, policy] : kScales) {
    scale_both(policy, name);
    if (!quick || name[0] != 'h') replays(kRules[0], name, policy, quick ? 40 : 200);
  }
  std::printf(failures ? "%d failures\n" : "all equal\n", failures);
  return failures != 0;
}
