#pragma once
// The family of rules that a unit is compiled for: AMP_MP_FAMILY names its header in core/rules.

#define AMP_MP_TEXT_OF(x) #x
#define AMP_MP_TEXT(x) AMP_MP_TEXT_OF(x)
#define AMP_MP_JOIN_OF(a, b) a##b
#define AMP_MP_JOIN(a, b) AMP_MP_JOIN_OF(a, b)

// clang-format off: spaces would be part of the path
#include AMP_MP_TEXT(core/rules/AMP_MP_FAMILY.h)
// clang-format on

#define AMP_MP_FOR_EACH_RULE_OF_FAMILY(X) AMP_MP_JOIN(AMP_MP_RULES_OF_, AMP_MP_FAMILY)(X)
