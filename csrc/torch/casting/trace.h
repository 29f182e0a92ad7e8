#pragma once
// Reports of the casts that autocast makes, for debugging.
#include <c10/core/ScalarType.h>

#include <string>
#include <tuple>
#include <vector>

namespace amp_mp::casting {

// print: casts that are computed, not those found in the cache, to stderr. record: all casts, to a
// list that take_log() empties.
enum class Trace : int { off, print, record };
void set_trace(Trace trace);
bool is_tracing();

// Operator, argument, dtypes before and after, and whether the copy was found in the cache.
using Cast = std::tuple<std::string, std::string, std::string, std::string, bool>;
std::vector<Cast> take_log();

// Reports a cast. Call only if is_tracing().
void trace_cast(const std::string& op, const std::string& argument, at::ScalarType from,
                at::ScalarType to, bool cached);

}  // namespace amp_mp::casting
