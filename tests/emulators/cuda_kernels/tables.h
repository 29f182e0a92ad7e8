#pragma once
// The table of a step's slots in device memory, against the slots themselves.
#include "cuda/step_arguments.h"
#include "measuring.h"

namespace {

// A step's table, in memory of its own.
struct OwnTable {
  std::vector<uint4> memory;
  std::vector<char> mirror;
  cuda::StepTable table;

  // For plans of these rows and groups; with none for one plan that is short.
  OwnTable(int64_t rows, int64_t groups) {
    const bool is_short = rows == 0;
    table.rows = is_short ? cuda::kShortRows : rows;
    table.groups = groups;
    const int64_t bytes = cuda::table_bytes(table.rows, groups);
    expect(bytes % sizeof(uint4) == 0, "a table is whole pieces", "", size_t(rows));
    memory.resize(size_t(bytes) / sizeof(uint4));
    table.memory = reinterpret_cast<char*>(memory.data());
    std::memset(table.memory, cuda::kUnknown, size_t(bytes));
    if (is_short) return;
    mirror.assign(size_t(bytes), char(cuda::kUnknown));
    table.mirror = mirror.data();
  }
  OwnTable(const OwnTable&) = delete;

  bool write(const cuda::StepPlan& plan, bool only_asks = false) {
    bool differs = false;
    expect(!cuda::write_table(plan, table, only_asks, differs, nullptr), "a table is written", "",
           0);
    return differs;
  }
};

cuda::StepPlan plan_of(const RuleInfo& rule, const std::vector<Slot>& slots,
                       const std::vector<Hyper>& hypers) {
  const auto count = int64_t(slots.size());
  return {slots.data(), count, hypers.data(), cuda::chunk_of(slots.data(), count),
          rule.needs_update_norm};
}

// Whether the device has what the kernels are to read for a plan.
bool has(const OwnTable& own, const cuda::StepPlan& plan) {
  const cuda::StepTable& table = own.table;
  const cuda::TableLayout layout(table.rows, table.groups);
  const auto at = [&]<class T>(int64_t from, int64_t index, const T& wanted) {
    return !std::memcmp(table.memory + from + index * int64_t(sizeof wanted), &wanted,
                        sizeof wanted);
  };
  bool all = true;
  for (int64_t t = 0; t < plan.count; ++t) {
    const Slot& s = plan.slots[t];
    all = all && at(layout.entries, s.row, cuda::entry_of(s));
    Hyper hyper = plan.hypers[s.group];
    if (cuda::rates_travel(table.groups)) hyper.lr = 0;
    all = all && at(layout.hypers, s.group, hyper);
    if (!cuda::grads_travel(table.groups, plan.count))
      all = all && at(layout.grads, t, s.grad.data);
  }
  for (const bool spans : {false, true})
    if (!spans || plan.has_update_sums)
      cuda::for_each_start(plan, spans ? kSpan : plan.chunk,
                           [&](int64_t t, const cuda::Start& start) {
                             all = all && at(spans ? layout.spans : layout.starts, t, start);
                           });
  return all;
}

// A table that is kept while the slots, their numbers and the choice of slots change by chance.
void tables_follow(const char* op, size_t count, int changes) {
  const RuleInfo& rule = *rule_named(op);
  Model model(repeated(kTiny, count, 7), false, rule.states, squares_of(rule));
  std::vector<Slot> all = model.slots(), chosen = all;
  std::vector<Hyper> hypers = model.hypers();
  OwnTable own(all.back().row + 1, all.back().group + 1);
  std::mt19937 random(5);
  const auto some = [&](std::vector<Slot>& slots) -> Slot& {
    return slots[random() % slots.size()];
  };
  expect(own.write(plan_of(rule, chosen, hypers)), "a new table differs", "", 0);
  for (int change = 0; change < changes; ++change) {
    const bool differed = change % 6 != 0;
    switch (change % 6) {
      case 1: hypers[random() % size_t(own.table.groups)].beta1 = double(random()); break;
      case 2: some(chosen).state[0].data = &some(all); break;
      case 3: {
        Slot& s = some(chosen);
        (is_split(s.master.format) ? s.master.second : s.copy.data) =
            &some(all).tensor_index + change;
        break;
      }
      case 4: some(chosen).size += 1 + int64_t(random() % 9000); break;
      case 5:
        chosen = all;
        for (int n = 0; n < 3; ++n) chosen.erase(chosen.begin() + long(random() % chosen.size()));
        break;
    }
    for (Slot& s : chosen)
      if (cuda::grads_travel(own.table.groups, int64_t(count))) s.grad.data = &hypers[random() % 3];
    for (Hyper& h : hypers) h.lr = double(random());
    const cuda::StepPlan plan = plan_of(rule, chosen, hypers);
    const std::vector<char> before = own.mirror;
    expect(own.write(plan, true) == differed, "a table is asked", "", size_t(change));
    expect(own.mirror == before && has(own, plan) != differed, "asking changes nothing", "",
           size_t(change));
    expect(own.write(plan) == differed, "a table differs", "", size_t(change));
    expect(has(own, plan), "a table follows", "", size_t(change));
  }
}

}  // namespace
