#pragma once
// The directions of a rule that turns them into updates between its two passes (Muon).
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "torch/step/step.h"

namespace amp_mp {

// Other rules have none: `plan` is then the plan that was given.
class StoredDirections {
 public:
  const std::vector<Slot>& plan;  // with memory for the directions

  // The callbacks turn them into updates.
  StoredDirections(const RuleInfo& rule, const Slots& slots, const std::vector<Slot>& chosen,
                   const ApplyInputs& callbacks, const at::Tensor& verdict)
      : plan(rule.has_direction ? own_ : chosen), callbacks_(callbacks), verdict_(verdict) {
    if (!rule.has_direction) return;
    own_ = chosen;
    const std::vector<int64_t> offsets = slots.offsets();
    slots_ = offsets.size() - 1;
    const auto options = at::TensorOptions().dtype(at::kBFloat16).device(verdict.device());
    const bool all = chosen.size() + 1 == offsets.size();
    memory_ = all ? at::empty({offsets.back()}, options) : at::zeros({offsets.back()}, options);
    auto* data = static_cast<bfloat16*>(memory_.mutable_data_ptr());
    for (Slot& slot : own_)
      slot.state[rule.states - 1] = {data + offsets[size_t(slot.row)], Format::bfloat16};
  }
  StoredDirections(const StoredDirections&) = delete;

  void add_to(NormInputs& inputs) {
    if (!memory_.defined() || !callbacks_.make_updates) return;
    inputs.make_updates = [](void* self) { static_cast<StoredDirections*>(self)->update(); };
    inputs.directions = this;
  }

 private:
  void update() {
    const at::Tensor updates = callbacks_.make_updates(memory_);
    TORCH_CHECK_VALUE(updates.numel() == memory_.numel(), "amp_mp: the updates (",
                      describe(updates), ") must be as many as the directions, ", memory_.numel());
    if (!updates.is_same(memory_)) memory_.copy_(updates);
    if (!callbacks_.normalise) return;
    std::vector<bool> has_gradient(slots_, false);
    for (const Slot& slot : own_) has_gradient[size_t(slot.row)] = true;
    callbacks_.normalise(memory_, verdict_, has_gradient);
  }

  std::vector<Slot> own_;
  const ApplyInputs& callbacks_;
  const at::Tensor& verdict_;
  size_t slots_ = 0;
  at::Tensor memory_;
};

}  // namespace amp_mp
