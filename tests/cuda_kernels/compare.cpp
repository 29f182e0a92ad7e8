// The library's CUDA kernels against its CPU loops, bit for bit, over ragged lists of tensors.
// Built with the stand-in for CUDA, so it needs no GPU; buffers have exactly the size they need, so
// that the address sanitizer sees the first byte past them.
//
// Usage: compare [quick]. Prints what ran; exits 1 if anything differs.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "cpu/passes.h"
#include "cuda/passes.h"

using namespace amp_mp;

namespace {

int failures = 0;

void expect(bool holds, const char* what, size_t where) {
  if (holds) return;
  if (failures++ < 10) std::fprintf(stderr, "FAILED %s, tensor %zu\n", what, where);
}

size_t width(Format f) { return f == Format::float32 ? 4 : 2; }

// n elements of a format, `shift` of them off an aligned address.
class Array {
 public:
  Array(size_t n, Format format, int shift)
      : n_(n), format_(format), shift_(shift), bytes_((n + shift) * width(format)) {
    data_.reset(static_cast<char*>(std::malloc(bytes_ ? bytes_ : 1)));
  }

  Span span() const { return {data_.get() + shift_ * width(format_), format_}; }

  void fill(std::mt19937& random, float spread) {
    std::normal_distribution<float> normal(0, spread);
    for (size_t i = 0; i < n_; ++i) set(i, normal(random));
  }

  void set(size_t i, float x) {
    char* at = static_cast<char*>(span().data) + i * width(format_);
    if (format_ == Format::float32) std::memcpy(at, &x, 4);
    if (format_ == Format::float16 || format_ == Format::float16_root) {
      const float16 h = encode_float16(x);
      std::memcpy(at, &h, 2);
    }
    if (format_ == Format::bfloat16) {
      const bfloat16 b = encode_bfloat16(x);
      std::memcpy(at, &b, 2);
    }
  }

  bool same_bytes(const Array& other) const {
    return !std::memcmp(span().data, other.span().data, n_ * width(format_));
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  size_t n_;
  Format format_;
  int shift_;
  size_t bytes_;
  std::unique_ptr<char, Free> data_;
};

// A model: ragged tensors of mixed formats, alignments and groups; the same for the same seed.
struct Model {
  std::vector<size_t> sizes;
  std::vector<Array> grad, weight, master, state0, state1;
  std::vector<Clock> clocks;
  std::vector<Slot> slots;
  std::vector<Reading> readings;

  Model(const std::vector<size_t>& tensor_sizes, int per_group, bool bad, unsigned seed)
      : sizes(tensor_sizes) {
    std::mt19937 random(seed);
    clocks.assign(sizes.size(), {2, 0.81, 0.998});
    for (size_t t = 0; t < sizes.size(); ++t) {
      const size_t n = sizes[t];
      const auto format = [&](size_t k) { return Format(k % 3); };
      const int shift = t % 4 == 1 ? int(1 + t % 7) : 0;  // elements
      grad.emplace_back(n, format(t), shift);
      weight.emplace_back(n, format(t / 3), t % 5 == 2 ? 3 : 0);
      // mostly float32, as in use
      const auto rare = [&](size_t k, Format a, Format b) {
        return k % 8 == 6 ? a : k % 8 == 7 ? b : Format::float32;
      };
      master.emplace_back(n, rare(t, Format::float16, Format::bfloat16), t % 6 == 4 ? 1 : 0);
      state0.emplace_back(n, rare(t + 1, Format::bfloat16, Format::float16), 0);
      state1.emplace_back(n, rare(t + 3, Format::float16_root, Format::bfloat16),
                          t % 7 == 3 ? 1 : 0);
      grad[t].fill(random, t % 11 == 5 ? 1e-20f : 8.0f);
      master[t].fill(random, t % 9 == 7 ? 1e5f : 1.0f);  // beyond float16: stored saturated
      state0[t].fill(random, 1e-2f);
      std::uniform_real_distribution<float> positive(0, 1e-2f);
      for (size_t i = 0; i < n; ++i) state1[t].set(i, positive(random));
      weight[t].fill(random, 1.0f);
    }
    if (bad)
      for (size_t t = 0; t < sizes.size(); ++t)
        if (sizes[t] > 1) {
          grad[t].set(sizes[t] - 1, HUGE_VALF);
          grad[t].set(0, std::nanf(""));
        }
    for (size_t t = 0; t < sizes.size(); ++t) {
      Slot s = {};
      s.size = int64_t(sizes[t]);
      s.grad = grad[t].span();
      if (weight[t].span().format != Format::float32) s.weight = weight[t].span();
      s.master = master[t].span();
      s.state[0] = state0[t].span();
      s.state[1] = state1[t].span();
      s.clock = &clocks[t];
      s.group = int32_t(t / size_t(per_group));
      slots.push_back(s);
      readings.push_back({s.size, s.grad});
    }
  }

  bool same(const Model& other, size_t t) const {
    return weight[t].same_bytes(other.weight[t]) && master[t].same_bytes(other.master[t]) &&
           state0[t].same_bytes(other.state0[t]) && state1[t].same_bytes(other.state1[t]) &&
           !std::memcmp(&clocks[t], &other.clocks[t], sizeof(Clock));
  }
};

std::vector<Statistics> measure_both(const Model& model) {
  const auto count = int64_t(model.sizes.size());
  const int64_t spans = cpu::count_spans(model.readings.data(), count);
  std::vector<Statistics> wanted(count + 1), found(count + 1);
  std::vector<Statistics> scratch(spans), device_scratch(spans);
  std::vector<int64_t> first(count + 1);
  cpu::measure(model.readings.data(), count, scratch.data(), wanted.data(), 1);
  const char* error = cuda::measure(model.readings.data(), count, device_scratch.data(),
                                    first.data(), found.data(), nullptr);
  expect(!error, "measure is launched", 0);
  for (size_t t = 0; t < wanted.size(); ++t)
    expect(!std::memcmp(&wanted[t], &found[t], sizeof(Statistics)), "measure", t);
  return found;
}

template <class Rule>
void step_both(const std::vector<size_t>& sizes, int per_group, bool bad, const char* name) {
  Model wanted(sizes, per_group, bad, 7), found(sizes, per_group, bad, 7);
  const Model before(sizes, per_group, bad, 7);
  const auto count = int64_t(sizes.size());
  std::vector<Hyper> hypers;
  for (int64_t g = 0; g <= count / per_group; ++g)
    hypers.push_back(
        {1e-3 * double(g + 1), 0.9, 0.999, 1e-8, 0.01, 0.9, 0.1, 0.01, false, g % 2 == 1});
  const std::vector<Statistics> statistics = measure_both(found);
  const float scale = 1024;
  const Verdict host = decide(&statistics[count], &scale, nullptr, 1.0);
  Verdict verdict = {};
  cuda::decide(&statistics[count], &scale, nullptr, 1.0, &verdict, nullptr);
  expect(!std::memcmp(&host, &verdict, sizeof host), "decide", 0);
  expect((verdict.found_inf != 0) == bad, "overflow is found", 0);
  std::vector<Rule> rules(count), device_rules(count);
  if (!bad)
    cpu::apply<Rule>(wanted.slots.data(), count, hypers.data(), host.multiplier, rules.data(), 1);
  const char* error = cuda::apply<Rule>(found.slots.data(), count, hypers.data(), &verdict,
                                        device_rules.data(), nullptr);
  expect(!error, "apply is launched", 0);
  for (size_t t = 0; t < sizes.size(); ++t) {
    expect(found.same(wanted, t), bad ? "a skipped step changes nothing" : "apply", t);
    if (!bad && sizes[t] > 0) expect(!found.same(before, t), "apply changes something", t);
  }
  std::printf("%s: %zu tensors, %s\n", name, sizes.size(), bad ? "overflow" : "applied");
}

constexpr double kFactor = 2e4;  // takes some numbers beyond float16

void copy_both(const std::vector<size_t>& sizes) {
  Model wanted(sizes, 1000, false, 3), found(sizes, 1000, false, 3);
  const auto transfers = [&](const Model& m) {
    std::vector<Transfer> list;
    for (size_t t = 0; t < sizes.size(); ++t) {
      const Span from = t % 2 ? m.grad[t].span() : m.master[t].span();
      list.push_back({int64_t(sizes[t]), m.weight[t].span(), from, t % 3 == 0});
    }
    return list;
  };
  const auto count = int64_t(sizes.size());
  cpu::copy(transfers(wanted).data(), count, kFactor, 1);
  cuda::copy(transfers(found).data(), count, nullptr, kFactor, nullptr);
  for (size_t t = 0; t < sizes.size(); ++t) expect(found.same(wanted, t), "copy", t);
  Verdict overflow = {1, 1, 0, 0, 1};
  cuda::copy(transfers(found).data(), count, &overflow, 1.0, nullptr);
  for (size_t t = 0; t < sizes.size(); ++t) expect(found.same(wanted, t), "skipped copy", t);
  std::printf("copy: %zu tensors\n", sizes.size());
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
    expect(host == device, name, size_t(i));
  }
  expect(host[1] != start.scale, name, 0);
}

void scales_both() {
  scale_both(BackoffScale{1, 65536, 1, 16777216, 2, 5, 0, -1}, "Backoff");
  scale_both(HysteresisScale{2, 65536, 1, 16777216, 2, .5, 5, 2, 0, 0, 2}, "hysteresis, Apex");
  scale_both(HysteresisScale{2, 65536, 1, 16777216, 2, .5, 5, 2, 1, 0, 2}, "hysteresis, Megatron");
  scale_both(LogMaxScale{3, 1, 1e-9, 16777216, 16, .99, .999, 3.09, 0, 0, 0, 1, 1}, "LogMax");
  scale_both(AdaptiveScale{4, 1000, 1, 16777216, 1000}, "adaptive");
}

}  // namespace

int main(int argc, char** argv) {
  const bool quick = argc > 1 && !std::strcmp(argv[1], "quick");
  const std::vector<size_t> ragged = {0,    1,    7,     8,     9,     0,     63, 64,   65,
                                      4095, 4096, 4097,  16383, 16384, 16385, 3,  2049, 15,
                                      16,   17,   65535, 65536, 65537, 31,    0,  33,   70001};
  step_both<AdamW>(ragged, 2, false, "AdamW");
  step_both<AdamW>(ragged, 2, true, "AdamW");
  step_both<SGD>(ragged, 2, false, "SGD");
  if (!quick) {
#define AMP_MP_STEP(Rule, op) step_both<Rule>(ragged, 100, false, #Rule);
    AMP_MP_FOR_EACH_RULE(AMP_MP_STEP)
    step_both<AdamW>({}, 1, false, "AdamW");
    step_both<AdamW>({0, 0, 0}, 1, false, "AdamW");
    step_both<AdamW>(std::vector<size_t>(1500, 5), 400, false, "AdamW");  // several launches
    step_both<SGD>(std::vector<size_t>(40, 33), 1, false,
                   "SGD");  // more groups than a launch takes
  }
  copy_both(ragged);
  scales_both();
  std::printf(failures ? "%d failures\n" : "all equal\n", failures);
  return failures != 0;
}
