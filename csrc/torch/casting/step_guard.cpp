#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>

#include <memory>
#include <string_view>

#include "torch/bind.h"

namespace amp_mp::casting {
namespace {

using at::autocast::is_autocast_enabled;
using at::autocast::set_autocast_enabled;

// Whether autocast was on when a step began.
struct CastsBefore : at::ObserverContext {
  bool on_cpu = is_autocast_enabled(at::kCPU), on_cuda = is_autocast_enabled(at::kCUDA);
};

std::unique_ptr<at::ObserverContext> step_begins(const at::RecordFunction& function) {
  // The name that torch.optim.Optimizer.profile_hook_step gives it.
  if (!std::string_view(function.name()).starts_with("Optimizer.step#")) return nullptr;
  return std::make_unique<CastsBefore>();
}

void step_ends(const at::RecordFunction&, at::ObserverContext* context) {
  if (!context) return;
  at::autocast::clear_cache();
  const auto& before = static_cast<const CastsBefore&>(*context);
  if (before.on_cpu) set_autocast_enabled(at::kCPU, true);
  if (before.on_cuda) set_autocast_enabled(at::kCUDA, true);
}

// From now on, where autocast is on when an optimizer's step begins, it is on again when the step
// ends, and casts from before the step are dropped; also by an exception, at which torch runs no
// post-hook. torch wraps every step in a RecordFunction and reports its end in both cases. Calls
// after the first do nothing.
void guard_steps() {
  static const at::CallbackHandle handle = at::addGlobalCallback(
      at::RecordFunctionCallback(step_begins, step_ends).scopes({at::RecordScope::USER_SCOPE}));
  static_cast<void>(handle);
}

}  // namespace

void bind_step_guard(py::module_& m) { m.def("guard_steps", &guard_steps); }

}  // namespace amp_mp::casting
