// Prints for each rule: its name in C++, for how many layouts its apply kernel is compiled besides
// the run-time one, and whether it divides by a root.
#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <typeinfo>

#include "cuda/gpu.h"
#include "cuda/layouts.h"

using namespace amp_mp;

template <uint32_t... Layouts>
constexpr int count(cuda::LayoutList<Layouts...>) {
  return int(sizeof...(Layouts));
}

template <class Rule>
void tell() {
  char* name = abi::__cxa_demangle(typeid(Rule).name(), nullptr, nullptr, nullptr);
  std::printf("%s\t%d\t%d\n", name, count(typename cuda::LayoutsOf<Rule>::type{}),
              int(divides_by_root<Rule>));
  std::free(name);
}

int main() {
#define AMP_MP_TELL(Rule, op) tell<Rule>();
  AMP_MP_FOR_EACH_RULE(AMP_MP_TELL)
}
