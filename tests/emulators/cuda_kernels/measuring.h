#pragma once
// Measuring on both sides, and the expectations that all comparisons share.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda/combine.h"
#include "cuda/passes.h"
#include "model.h"

namespace {

int failures = 0;
const char* stop_at = nullptr;  // part of a failure's text: that failure ends the program

void expect(bool holds, const char* what, const char* detail, size_t where) {
  if (holds) return;
  char text[256];
  std::snprintf(text, sizeof text, "FAILED %s, %s, tensor %zu", what, detail, where);
  if (failures++ < 20) std::fprintf(stderr, "%s\n", text);
  if (stop_at && std::strstr(text, stop_at)) std::exit(1);
}

bool same(const Statistics& a, const Statistics& b) { return !std::memcmp(&a, &b, sizeof a); }

// What a measuring pass on the device leaves, with the memory it leaves it in.
struct Measuring {
  std::vector<Statistics> tensors, spans;
  std::vector<int64_t> first;
  unsigned ticket = 7;  // whatever was there
  cuda::SpanSums sums;

  Measuring(const std::vector<Reading>& readings, const char* name)
      : tensors(readings.size() + 1),
        spans(size_t(cpu::count_spans(readings.data(), int64_t(readings.size()))) + 1),
        first(readings.size() + 1) {
    sums = {spans.data(), first.data(), &ticket, tensors.data(), int64_t(readings.size())};
    expect(!cuda::measure(readings.data(), sums, nullptr), "measure is launched", name, 0);
    if (readings.empty()) ticket = first[0] = 0;  // nothing was launched
  }
  Measuring(const Measuring&) = delete;

  void expect_same(const std::vector<Statistics>& wanted, const char* name) const {
    for (size_t t = 0; t < wanted.size(); ++t)
      expect(same(wanted[t], tensors[t]), "measure", name, t);
  }
};

std::vector<Statistics> measure_on_cpu(const std::vector<Reading>& readings) {
  const auto count = int64_t(readings.size());
  std::vector<Statistics> tensors(count + 1), spans(cpu::count_spans(readings.data(), count));
  cpu::measure(readings.data(), count, spans.data(), tensors.data(), 1);
  return tensors;
}

void measure_both(const std::vector<Reading>& readings, const char* name) {
  Measuring found(readings, name);
  cuda::combine(found.sums, nullptr);
  found.expect_same(measure_on_cpu(readings), name);
}

// The upper levels of a sum alone, for tensors of more spans than could be measured here.
void combine_both(const std::vector<int64_t>& spans_of) {
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> exponent(-30, 30);
  std::vector<int64_t> first = {0};
  for (const int64_t n : spans_of) first.push_back(first.back() + n);
  std::vector<Statistics> spans(size_t(first.back()) + 1), tensors(spans_of.size() + 1);
  for (Statistics& s : spans)
    s = {std::exp2(exponent(random)), std::exp2(exponent(random)), double(random() % 3)};
  unsigned ticket = 0;
  const auto count = int64_t(spans_of.size());
  expect(!cuda::combine({spans.data(), first.data(), &ticket, tensors.data(), count}, nullptr),
         "combine is launched", "", 0);
  std::vector<Statistics> wanted;
  for (size_t t = 0; t < spans_of.size(); ++t)
    wanted.push_back(combine(spans.data() + first[t], spans_of[t]));
  wanted.push_back(combine(wanted.data(), count));
  for (size_t t = 0; t < wanted.size(); ++t)
    expect(same(wanted[t], tensors[t]), "sums of spans", "", t);
  std::printf("combine: %zu tensors\n", spans_of.size());
}

}  // namespace
