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
  const Cast cast{op, argument, c10::toString(from), c10::toString(to), cached};
  if (trace.load() == Trace::print && !cached)
    fprintf(stderr, "amp_mp: %s(%s): %s -> %s\n", cast.op.c_str(), cast.argument.c_str(),
            cast.from.c_str(), cast.to.c_str());
  const std::lock_guard<std::mutex> lock(log_mutex);
  if (trace.load() == Trace::record) log.push_back(cast);
}

}  // namespace amp_mp::casting
