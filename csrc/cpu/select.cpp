// Which instruction set's loops run. AMP_MP_AVX2 and AMP_MP_AVX512 are defined where these sets are
// compiled; baseline always is.
#include <cstdlib>
#include <cstring>

#include "core/rules.h"
#include "cpu/kernels.h"

namespace amp_mp::cpu {

#define AMP_MP_DECLARE(Rule, op) extern const Loops op;
#define AMP_MP_NAME(Rule, op) &op,
#define AMP_MP_SET(isa)                                                      \
  namespace isa {                                                            \
  extern const Kernels table;                                                \
  AMP_MP_FOR_EACH_RULE(AMP_MP_DECLARE)                                       \
  const Loops* const loops_of_rules[] = {AMP_MP_FOR_EACH_RULE(AMP_MP_NAME)}; \
  }
AMP_MP_SET(baseline)
#ifdef AMP_MP_AVX2
AMP_MP_SET(avx2)
#endif
#ifdef AMP_MP_AVX512
AMP_MP_SET(avx512)
#endif

namespace {

struct Candidate {
  const Kernels* table;
  const Loops* const* loops_of_rules;
  bool runs_here;
};

Candidate choose() {
  const Candidate best_first[] = {
#ifdef AMP_MP_AVX512
      {&avx512::table, avx512::loops_of_rules, __builtin_cpu_supports("x86-64-v4") != 0},
#endif
#ifdef AMP_MP_AVX2
      {&avx2::table, avx2::loops_of_rules, __builtin_cpu_supports("x86-64-v3") != 0},
#endif
      {&baseline::table, baseline::loops_of_rules, true},
  };
  const char* wanted = getenv("AMP_MP_CPU");
  for (const Candidate& c : best_first)
    if (c.runs_here && (!wanted || !*wanted || !strcmp(wanted, c.table->name))) return c;
  return {};
}

const Candidate& chosen() {
  static const Candidate once = choose();
  return once;
}

}  // namespace

const Kernels* kernels() { return chosen().table; }

const Loops& loops_of(const RuleInfo& rule) { return *chosen().loops_of_rules[rule.index]; }

}  // namespace amp_mp::cpu
