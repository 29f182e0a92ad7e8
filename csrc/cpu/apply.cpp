// The inner loops of one family of rules (core/family.h), compiled once for each instruction set as
// loops.cpp is, whose restrictions hold here too.
#include "core/family.h"
#include "cpu/first_passes.h"
#include "cpu/kernels.h"

namespace amp_mp::cpu::AMP_MP_ISA {

#define AMP_MP_LOOPS(Rule, op) \
  extern const Loops op;       \
  const Loops op = {apply<Rule>, directions<Rule>, update_sums<Rule>};
AMP_MP_FOR_EACH_RULE_OF_FAMILY(AMP_MP_LOOPS)

}  // namespace amp_mp::cpu::AMP_MP_ISA
