#pragma once
// What a rule declares: the states that it keeps of each parameter and the numbers that it reads of
// a param_group. csrc/torch/state/rule_table.cpp makes entries of state dicts of it.
#include <cstdint>
#include <initializer_list>

namespace amp_mp {

constexpr int kMaxStates = 3;

// What a state holds, and so how it may be stored: an average of gradients; one of which updates of
// whole matrices are made; an average or sum of squares; anything else, which is float32 always.
enum class Kind : uint8_t { moment, matrix_moment, square, exact };

constexpr bool is_moment(Kind kind) { return kind == Kind::moment || kind == Kind::matrix_moment; }

// A tensor of the parameter's shape.
struct RuleState {
  const char* name = "";  // torch's
  Kind kind = Kind::exact;
  bool late = false;  // a setting switches it on: a parameter that has taken steps may lack it
  const char* initial = nullptr;  // the param_group's entry that fills a new one; else it is 0
};

// Which numbers an entry of a param_group may have; of_member: as Hyper's member.
enum class Range : uint8_t { of_member, any, not_negative, below_one, up_to_one };

// An entry of a param_group, "eps", or one of several numbers in it, "betas[0]".
struct Number {
  const char* key;
  const char* as;    // its name in Hyper
  const char* when;  // an entry: where it is false, Hyper's number is 0; or null
  Range range;
  constexpr Number() : Number("") {}
  constexpr Number(const char* entry, const char* name = nullptr, const char* flag = nullptr,
                   Range allowed = Range::of_member)
      : key(entry), as(name ? name : entry), when(flag), range(allowed) {}
};

// One number for each parameter, Clock::own, and what it is before the first step.
struct OwnNumber {
  const char* name;
  double start;
  bool late = false;  // as RuleState's
};

// A list that a rule declares.
template <class T, int kMost>
struct Declared {
  T of[kMost] = {};
  int count = 0;

  constexpr Declared() = default;  // without it nvcc makes of `{}` a list of one
  constexpr Declared(std::initializer_list<T> list) {
    for (const T& each : list) of[count++] = each;
  }
  constexpr const T* begin() const { return of; }
  constexpr const T* end() const { return of + count; }
  // The same list, and one more.
  constexpr Declared with(const T& more) const {
    Declared longer = *this;
    longer.of[longer.count++] = more;
    return longer;
  }
};
using States = Declared<RuleState, kMaxStates>;  // in the order of the rule's arguments
using Numbers = Declared<Number, 16>;

constexpr Number kBeta1 = {"betas[0]", "beta1"}, kBeta2 = {"betas[1]", "beta2"};
// By hand: std::string_view would bring functions of std into cpu/loops.cpp, which must have none.
constexpr bool same_text(const char* a, const char* b) {
  for (; *a && *a == *b; ++a) ++b;
  return *a == *b;
}

}  // namespace amp_mp
