// Which instruction set's loops run. AMP_MP_X86 is defined where all three are compiled.
#include <cstdlib>
#include <cstring>

#include "cpu/kernels.h"

namespace amp_mp::cpu {

namespace baseline {
extern const Kernels table;
}
#ifdef AMP_MP_X86
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
#endif

namespace {

struct Candidate {
  const Kernels* table;
  bool runs_here;
};

const Kernels* choose() {
  const Candidate best_first[] = {
#ifdef AMP_MP_X86
      {&avx512::table, __builtin_cpu_supports("x86-64-v4") != 0},
      {&avx2::table, __builtin_cpu_supports("x86-64-v3") != 0},
#endif
      {&baseline::table, true},
  };
  const char* wanted = getenv("AMP_MP_CPU");
  for (const Candidate& c : best_first)
    if (c.runs_here && (!wanted || !*wanted || !strcmp(wanted, c.table->name))) return c.table;
  return nullptr;
}

}  // namespace

const Kernels* kernels() {
  static const Kernels* const chosen = choose();
  return chosen;
}

}  // namespace amp_mp::cpu
