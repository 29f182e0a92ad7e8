#include "ledger.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <utility>

#include "runtime.h"

namespace pretend_gpu {
namespace {

std::mutex ledger_mutex;
bool is_open = false;
Ledger ledger;

}  // namespace

void refuse_during_capture(const std::string& name) {
  TORCH_CHECK(!cuda_on_cpu::under_way(), "pretend GPU: ", name,
              " is not permitted while a stream is capturing");
}

void note_operator(const std::string& name) {
  refuse_during_capture(name);
  const std::lock_guard<std::mutex> lock(ledger_mutex);
  if (is_open) ledger.operators.push_back(name);
}

void note_sync(const std::string& name) {
  refuse_during_capture(name);
  ++cuda_on_cpu::counts.synchronisations;
  const std::lock_guard<std::mutex> lock(ledger_mutex);
  if (is_open) ledger.syncs.push_back(name);
}

void open_ledger() {
  const std::lock_guard<std::mutex> lock(ledger_mutex);
  TORCH_CHECK(!is_open, "pretend GPU: a ledger is open already");
  is_open = true;
}

Ledger close_ledger() {
  const std::lock_guard<std::mutex> lock(ledger_mutex);
  is_open = false;
  return std::exchange(ledger, {});
}

}  // namespace pretend_gpu
