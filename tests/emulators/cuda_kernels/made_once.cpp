// How often decide_step makes a rule: once for a group and a clock in each pass over the slots.
//
// AdamW's rule takes one square root in double precision; this file counts them.
#include <cmath>

#include "cuda_on_cpu.h"

namespace {
int roots = 0;

double counted_root(double x) {
  ++roots;
  return __builtin_sqrt(x);
}
}  // namespace

#define sqrt counted_root
#include "cuda/decide.cu"
#undef sqrt

#pragma GCC diagnostic ignored "-Wunused-function"  // the header has more than is needed here
#include "tables.h"

namespace {

constexpr int kAnyNumber = -1;

// A step in which the verdict is given. odd: slots that began later than the others.
void rules_are_made(int count, int per_group, const std::vector<int>& odd, int wanted) {
  Model model(repeated(kTiny, size_t(count), per_group), false, 2, 0b10);
  for (Tensor& x : model.tensors) x.clock = {2, 0.81, 0.998, 3.5};
  for (const int t : odd) model.tensors[size_t(t)].clock = {1, 0.9, 0.999, 3.5};
  std::vector<Clock> clocks;
  for (const Tensor& x : model.tensors) clocks.push_back(x.clock);
  const std::vector<Slot> slots = model.slots();
  const std::vector<Hyper> hypers = model.hypers();
  const RuleInfo& adamw = *rule_named("adamw_");
  const cuda::StepPlan plan = plan_of(adamw, slots, hypers);
  OwnTable own(slots.back().row + 1, slots.back().group + 1);
  own.write(plan);
  std::vector<SlotRule<AdamW>> found(size_t(own.table.rows));
  Verdict verdict = {0, 0.5, 0, 0, 0};
  roots = 0;
  const char* error = cuda::decide_step(adamw, plan, own.table, nullptr, &verdict, {}, {},
                                        found.data(), {}, false, false, nullptr);
  expect(!error && (roots == wanted || wanted == kAnyNumber), "rules are made", "AdamW",
         size_t(roots));
  for (size_t t = 0; t < slots.size(); ++t) {
    const Hyper& hyper = hypers[size_t(slots[t].group)];
    clocks[t].tick(hyper);
    const AdamW rule = make_rule<AdamW>(hyper, clocks[t], {});
    expect(!std::memcmp(&rule, &found[size_t(slots[t].row)].rule, sizeof rule), "a rule", "AdamW",
           t);
    expect(!std::memcmp(&clocks[t], slots[t].clock, sizeof(Clock)), "a clock", "AdamW", t);
  }
}

}  // namespace

int main() {
  constexpr int kPass = 2 * cuda::kCombineThreads;
  rules_are_made(kPass, kPass, {}, 1);
  rules_are_made(kPass, kPass / 4, {}, 4);
  rules_are_made(2 * kPass + 1, 4 * kPass, {}, 3);
  rules_are_made(kPass, kPass, {0, 7, 300}, 2);
  rules_are_made(kPass, kPass, {kPass - 1}, 2);
  rules_are_made(kPass, kPass / 128, {}, kAnyNumber);  // some without a leader: 32 can lead
  std::printf(failures ? "%d failures\n" : "all equal\n", failures);
  return failures != 0;
}
