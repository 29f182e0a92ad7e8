#pragma once
// The directions of a rule that turns them into updates between its two passes (Muon).
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "torch/step/step.h"

namespace amp_mp {

// Other rules have none: `plan` is then the plan that was given.
template <class Rule>
class Directions {
 public:
  const std::vector<Slot>& plan;

  Directions(const Slots&, const std::vector<Slot>& chosen, const GatherUpdates&, const at::Device&)
      : plan(chosen) {}
  void add_to(NormInputs&) {}
};

template <class Rule>
  requires has_direction<Rule>
class Directions<Rule> {
 public:
  const std::vector<Slot>& plan;  // with memory for the directions

  // `update` makes the updates.
  Directions(const Slots& slots, const std::vector<Slot>& chosen, const GatherUpdates& update,
             const at::Device& device)
      : plan(own_), own_(chosen), update_(update) {
    const std::vector<int64_t> offsets = slots.offsets();
    const auto options = at::TensorOptions().dtype(at::kBFloat16).device(device);
    const bool all = chosen.size() + 1 == offsets.size();
    memory_ = all ? at::empty({offsets.back()}, options) : at::zeros({offsets.back()}, options);
    auto* data = static_cast<bfloat16*>(memory_.mutable_data_ptr());
    for (Slot& slot : own_)
      slot.state[Rule::kStates - 1] = {data + offsets[size_t(slot.row)], Format::bfloat16};
  }
  Directions(const Directions&) = delete;

  void add_to(NormInputs& inputs) {
    if (!update_) return;
    inputs.gather = [](void* self) -> const Statistics* {
      static_cast<Directions*>(self)->update();
      return nullptr;
    };
    inputs.context = this;
  }

 private:
  void update() {
    const at::Tensor updates = update_(memory_);
    TORCH_CHECK_VALUE(updates.numel() == memory_.numel(), "amp_mp: the updates (",
                      describe(updates), ") must be as many as the directions, ", memory_.numel());
    if (!updates.is_same(memory_)) memory_.copy_(updates);
  }

  std::vector<Slot> own_;
  const GatherUpdates& update_;
  at::Tensor memory_;
};

}  // namespace amp_mp
