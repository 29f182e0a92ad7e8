#pragma once
// The directions of a rule that turns them into updates between its two passes (Muon).
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "torch/step/step.h"

namespace amp_mp {

using MakeUpdates = decltype(StepCallbacks::make_updates);

// Other rules have none: `plan` is then the plan that was given.
template <class Rule>
class Directions {
 public:
  const std::vector<Slot>& plan;

  Directions(const Slots&, const std::vector<Slot>& chosen, const MakeUpdates&, const at::Device&)
      : plan(chosen) {}
  void add_to(NormInputs&) {}
};

template <class Rule>
  requires has_direction<Rule>
class Directions<Rule> {
 public:
  const std::vector<Slot>& plan;  // with memory for the directions

  // `make_updates` turns them into updates.
  Directions(const Slots& slots, const std::vector<Slot>& chosen, const MakeUpdates& make_updates,
             const at::Device& device)
      : plan(own_), own_(chosen), make_updates_(make_updates) {
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
    if (!make_updates_) return;
    inputs.gather = [](void* self) -> const Statistics* {
      static_cast<Directions*>(self)->update();
      return nullptr;
    };
    inputs.context = this;
  }

 private:
  void update() {
    const at::Tensor updates = make_updates_(memory_);
    TORCH_CHECK_VALUE(updates.numel() == memory_.numel(), "amp_mp: the updates (",
                      describe(updates), ") must be as many as the directions, ", memory_.numel());
    if (!updates.is_same(memory_)) memory_.copy_(updates);
  }

  std::vector<Slot> own_;
  const MakeUpdates& make_updates_;
  at::Tensor memory_;
};

}  // namespace amp_mp
