#pragma once
// Loss scales and reports on both sides.
#include "measuring.h"

namespace {

// A device's scale, and what it reports.
struct Outside {
  float scale = 1024;
  int32_t tracker = 3;
  float next_scale = 0;
  int32_t next_tracker = 0;
  StepReport reports[kStepReports] = {};
  StepCounts counts = {};
  uint64_t skipped = 0;  // in a row, as expected

  Criteria criteria_of() {
    Criteria d;
    d.scale = &scale;
    d.max_norm = 1.0;
    d.scale_update = {nullptr,  nullptr,       0,   &scale, &next_scale,
                      &tracker, &next_tracker, 2.0, 0.5,    4};
    d.report_buffer = {reports, &counts};
    return d;
  }

  // Call it for every report, in order.
  void expect_report(const Verdict& verdict, double moved_to, const char* name) {
    const StepReport& newest = reports[counts.decided % kStepReports];
    expect(newest.seal == counts.decided, "a report is sealed", name, size_t(newest.seal));
    expect(!std::memcmp(&newest.verdict, &verdict, sizeof verdict), "report", name, 0);
    expect(newest.next_scale == moved_to, "next scale", name, 0);
    skipped = verdict.skip != 0 ? skipped + 1 : 0;
    expect(newest.skipped_in_a_row == skipped, "skips in a row", name, size_t(skipped));
  }
};

// A policy's state as numbers.
template <class Scale>
std::vector<double> numbers_of(const Scale& policy) {
  std::vector<double> state(sizeof policy / sizeof(double));
  std::memcpy(state.data(), &policy, sizeof policy);
  return state;
}

ScaleUpdate in_place(std::vector<double>& policy, float& scale) {
  ScaleUpdate u;
  u.policy = u.policy_out = policy.data();
  u.policy_size = int32_t(policy.size());
  u.scale_out = &scale;
  return u;
}

void scale_both(std::vector<double> host, const char* name) {
  std::vector<double> device = host;
  const double start = host[1];
  float scale = 0;
  Outside outside;
  std::mt19937 random(1);
  std::normal_distribution<double> exponent(-6, 2);
  for (int i = 0; i < 300; ++i) {
    const double found_inf = random() % 9 == 0 ? 2 : 0;  // two devices saw it
    const double max_abs = random() % 50 == 0 ? 0 : std::exp2(exponent(random));
    update_scale_state(host.data(), found_inf != 0, max_abs);
    cuda::update_scale(in_place(device, scale), &found_inf, &max_abs,
                       {outside.reports, &outside.counts}, nullptr);
    expect(host == device && scale == float(host[1]), "scale", name, size_t(i));
    outside.expect_report({double(found_inf != 0), 1, 0, max_abs, scale}, scale, name);
  }
  expect(host[1] != start, "the scale moves", name, 0);
  for (const float found_inf : {1.0f, 0.0f}) {  // decided with no gradient measured
    Criteria inputs;
    inputs.found_inf = &found_inf;
    inputs.scale_update = in_place(device, scale);
    Verdict verdict = {};
    update_scale_state(host.data(), found_inf != 0, 0);
    cuda::decide(nullptr, inputs, &verdict, nullptr);
    expect(host == device && verdict.skip == double(found_inf), "a decided scale", name, 0);
  }
}

const std::vector<std::pair<const char*, std::vector<double>>> kScales = {
    {"Backoff", numbers_of(BackoffScale{1, 65536, 1, 16777216, 2, 5, 0, -1})},
    {"hysteresis, Apex", numbers_of(HysteresisScale{2, 65536, 1, 16777216, 2, .5, 5, 2, 0, 0, 2})},
    {"hysteresis, Megatron",
     numbers_of(HysteresisScale{2, 65536, 1, 16777216, 2, .5, 5, 2, 1, 0, 2})},
    {"LogMax", numbers_of(LogMaxScale{3, 1, 1e-9, 16777216, 16, .99, .999, 3.09, 0, 0, 0, 1, 1})},
    {"adaptive", numbers_of(AdaptiveScale{4, 1000, 1, 16777216, 1000})},
    {"tolerance", numbers_of(ToleranceScale{5, 32768, 1e-4, 16777216, 2, 5, .1, 0, -1, -1, 0})},
};

// The loss scale's own functions against the library's.
void logarithms() {
  std::mt19937_64 random(2);
  std::uniform_real_distribution<double> exponent(-1074, 1023.9);
  for (int i = 0; i < 200000; ++i) {
    const double y = exponent(random), x = std::exp2(y);
    const double wanted = std::log2(x), error = std::fabs(log2_of(x) - wanted);
    expect(error <= 4e-16 * std::fmax(1, std::fabs(wanted)), "log2", "", size_t(i));
    if (y > -1022) expect(std::fabs(exp2_of(y) / x - 1) <= 4e-16, "exp2", "", size_t(i));
  }
  for (int e = -1022; e < 1024; ++e)
    expect(log2_of(std::ldexp(1.0, e)) == e && exp2_of(e) == std::ldexp(1.0, e), "powers of 2", "",
           size_t(e + 1022));
  expect(exp2_of(1024) == HUGE_VAL && exp2_of(-1023) == 0, "bounds of exp2", "", 0);
}

}  // namespace
