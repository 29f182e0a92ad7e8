#include "torch/casting/trace.h"

#include <atomic>
#include <cstdio>
#include <mutex>
#include <utility>

namespace amp_mp::casting {
namespace {

// Never destroyed: threads may still be casting when the process ends.
std::mutex& log_mutex = *new std::mutex;
std::vector<Cast>& log = *new std::vector<Cast>;
std::atomic<Trace> trace{Trace::off};

}  // namespace

void set_trace(Trace value) { trace.store(value); }

bool is_tracing() { return trace.load(std::memory_order_relaxed) != Trace::off; }

std::vector<Cast> take_log() {
  const std::lock_guard<std::mutex> lock(log_mutex);
  return std::exchange(log, {});
}

void trace_cast(const std::string& op, const std::string& argument, at::ScalarType from,
                at::ScalarType to, bool cached) {
  const char *before = c10::toString(from), *after = c10::toString(to);
  if (trace.load() == Trace::print && !cached)
    fprintf(stderr, "amp_mp: %s(%s): %s -> %s\n", op.c_str(), argument.c_str(), before, after);
  const std::lock_guard<std::mutex> lock(log_mutex);
  if (trace.load() == Trace::record) log.emplace_back(op, argument, before, after, cached);
}

}  // namespace amp_mp::casting
