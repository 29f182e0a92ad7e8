#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>

#include <array>
#include <memory>
#include <string_view>

#include "torch/bind.h"

namespace amp_mp::casting {
namespace {

constexpr std::array kDevices = {at::kCPU, at::kCUDA};

// The device types that had autocast on when a step began.
struct CastsBefore : at::ObserverContext {
  std::array<bool, kDevices.size()> on{};
};

std::unique_ptr<at::ObserverContext> step_begins(const at::RecordFunction& function) {
  // The name that torch.optim.Optimizer.profile_hook_step gives it.
  if (!std::string_view(function.name()).starts_with("Optimizer.step#")) return nullptr;
  auto before = std::make_unique<CastsBefore>();
  for (size_t i = 0; i < kDevices.size(); ++i)
    before->on[i] = at::autocast::is_autocast_enabled(kDevices[i]);
  return before;
}

void step_ends(const at::RecordFunction&, at::ObserverContext* context) {
  if (!context) return;
  at::autocast::clear_cache();
  const auto& before = static_cast<const CastsBefore&>(*context);
  for (size_t i = 0; i < kDevices.size(); ++i)
    if (before.on[i]) at::autocast::set_autocast_enabled(kDevices[i], true);
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
