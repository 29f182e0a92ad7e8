// The library's CUDA kernels against its CPU loops, bit for bit, for every rule, format and kind of
// list. Built with the stand-in for CUDA, so it needs no GPU.
//
// Usage: compare full|lists|quick [TEXT]. lists: quick, with AdamW on lists of all lengths. Prints
// what ran; exits 1 if anything differs, at once when a failure's text has TEXT in it.
#include "averaging.h"
#include "changing.h"
#include "copying.h"
#include "float8.h"
#include "replaying.h"

namespace {

// A pass over lists of no tensor, and of as many as a launch takes, one less, and one more.
void lengths(void (*both)(const std::vector<size_t>&, size_t), size_t capacity, bool quick) {
  for (const size_t count : {size_t(0), capacity - 1, capacity, capacity + 1})
    if (!quick || count == 0 || count > capacity) both(kTiny, count);
}

void lengths_of_readings(bool quick) {
  constexpr int one = cuda::TensorTable<1>::kCapacity, two = cuda::TensorTable<2>::kCapacity;
  for (const Role role : {kGrad, kMaster})
    for (const int capacity : {role == kGrad ? one : two, 24, 16})
      for (int count : {0, capacity - 1, capacity, capacity + 1}) {
        if (quick && count != capacity + 1) continue;
        const Model model(repeated(kTiny, count, 100), false, 0, -1);
        std::vector<Reading> readings = model.readings(role);
        readings.resize(count);  // the gaps made it longer
        measure_both(readings, "of many");
      }
}

}  // namespace

int main(int argc, char** argv) {
  const auto is = [&](const char* size) { return argc > 1 && !std::strcmp(argv[1], size); };
  if (argc > 2) stop_at = argv[2];
  const bool lists = is("lists"), quick = is("quick") || lists;
  for (const size_t count : {10, cuda::kManyWords + 1}) tables_follow("adamw_", count, 60);
  tables_follow("lamb_", 700, 60);
  for (const RuleInfo& rule : rules()) {
    const auto r = size_t(rule.index);
    const bool is_adamw = &rule == rule_named("adamw_");
    const bool shown = is_adamw || rule.needs_update_norm || rule.has_direction;
    step_both(rule, repeated(kEdges, quick ? 39 : kAllPairs, 17, 39 * r));
    step_both(rule, presets());
    if (is_adamw) {
      refuses_other_kinds(rule);
      lengths_of_lists(rule, quick && !lists);
    }
    if (rule.needs_update_norm) {
      lengths_of_lists(rule, quick);
      for (const bool bad : {false, true})
        step_both(rule, repeated(kEdges, 37, 5), bad, false, true);
    }
    if (quick && !shown) continue;
    step_both(rule, repeated(kTiny, 37, 5, 37 * r), true, r % 2 == 1);
    step_both(rule, {kRagged, 2, 35 * r});
  }
  copy_both(kEdges, kFormatCount * kFormatCount);
  copy_both(kRagged, quick ? kRagged.size() : 5 * kFormatCount);
  lengths(copy_both, cuda::TensorTable<4, RandomStream>::kCapacity, quick);
  const size_t written = formats_of_masters(true).size(), read = formats_of_masters(false).size();
  average_both(kEdges, written * read);
  average_both(kRagged, quick ? kRagged.size() : 5 * read);
  lengths(average_both, cuda::TensorTable<4>::kCapacity, quick);
  change_both({1, 63, 64, 65, 257, 4099, 16384, 16385, 40001}, quick ? 21 : 63);
  lengths(change_both, cuda::TensorTable<3>::kCapacity, quick);
  float8_both(quick);
  lengths_of_readings(quick);
  combine_both({0, 1, 2, 31, 32, 33, 0, 255, 256, 257, 1023, 1024, 1025, 1281, 15259, 1, 0});
  combine_both({5000});
  std::vector<int64_t> many(1500, 1);
  for (size_t t = 0; t < many.size(); t += 7) many[t] = int64_t(t % 21);
  combine_both(many);
  logarithms();
  for (const auto& [name, policy] : kScales) {
    scale_both(policy, name);
    if (!quick || name[0] != 'h') replays(*rule_named("adamw_"), name, policy, quick ? 40 : 200);
  }
  std::printf(failures ? "%d failures\n" : "all equal\n", failures);
  return failures != 0;
}
