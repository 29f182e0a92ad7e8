#pragma once
// The memory, besides the slots' arrays, of rules that need norms of whole tensors.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "torch/python/scalars.h"
#include "torch/step/step.h"

namespace amp_mp {

using SumUpdates = ApplyInputs::Change;

class NormScratch {
 public:
  NormInputs inputs;
  Measurement* weights = nullptr;  // of the masters

  // `known`: the masters' statistics, if they are measured already. `plan` must outlive this
  // object.
  NormScratch(const RuleInfo& rule, Slots& slots, const std::vector<Slot>& plan, Statistics* grads,
              Measurement* known, const SumUpdates& sum_updates, const at::Device& device)
      : slot_count_(slots.size()), plan_(plan), sum_updates_(sum_updates) {
    if (rule.needs_norms) {
      weights = known ? known : &own_weights_.emplace(slots.weights(), device);
      inputs.grads = grads;
      inputs.weights = weights->of_tensors();
    }
    if (rule.needs_update_norm) {
      const int64_t count = kUpdateSums * int64_t(plan.size());
      int64_t spans = 0;
      for (const Slot& slot : plan) spans += kUpdateSums * ceil_divide(slot.size, kSpan);
      updates_ = at::empty({count + 1, 3}, at::TensorOptions().dtype(at::kDouble).device(device));
      inputs.updates = data_of<Statistics>(updates_);
      // The ticket, the index of each sum's first span, the sums of spans.
      const int64_t head = 8 * (count + 2);
      spans_ = scratch(head + spans * int64_t(sizeof(Statistics)), device);
      char* memory = data_of<char>(spans_);
      inputs.ticket = reinterpret_cast<unsigned*>(memory);
      inputs.first_span = reinterpret_cast<int64_t*>(memory) + 1;
      inputs.update_spans = reinterpret_cast<Statistics*>(memory + head);
      if (!sum_updates_) return;
      inputs.gather = [](void* self) { return static_cast<NormScratch*>(self)->gather(); };
      inputs.context = this;
    }
  }
  NormScratch(const NormScratch&) = delete;

  // A skipped step on a CPU: other processes may be waiting for this one's rows.
  void skip() {
    if (!inputs.gather) return;
    updates_.zero_();
    gather();
  }

 private:
  const Statistics* gather() {
    gathered_ = sum_updates_(rows_of_slots());
    check_device(gathered_, updates_.device(), {"the result of sum_updates"});
    TORCH_CHECK_VALUE(
        gathered_.dim() == 2 && gathered_.size(0) == slot_count_ && gathered_.size(1) == kColumns,
        "amp_mp: the result of sum_updates (", describe(gathered_), ") must have shape [",
        slot_count_, ", ", kColumns, "]");
    gathered_ = gathered_.contiguous();
    return check_doubles<Statistics>(gathered_, "the result of sum_updates", 0);
  }

  // The updates' sums, one row for each slot: zeros without a gradient.
  at::Tensor rows_of_slots() const {
    const auto count = int64_t(plan_.size());
    const at::Tensor sums =
        updates_.narrow(0, 0, kUpdateSums * count).view({kUpdateSums, count, 3});
    const at::Tensor found = sums.transpose(0, 1).reshape({count, kColumns});
    if (count == slot_count_) return found;
    const at::Tensor rows = at::zeros({slot_count_, kColumns}, updates_.options());
    for (int64_t i = 0, end = 0; i < count; i = end) {  // slots without a gap between them
      const int64_t first = plan_[size_t(i)].row;
      for (end = i + 1; end < count && plan_[size_t(end)].row == first + (end - i);) ++end;
      rows.narrow(0, first, end - i).copy_(found.narrow(0, i, end - i));
    }
    return rows;
  }

  static constexpr int64_t kColumns = 3 * kUpdateSums;

  int64_t slot_count_;
  const std::vector<Slot>& plan_;
  const SumUpdates& sum_updates_;
  std::optional<Measurement> own_weights_;
  at::Tensor updates_, spans_, gathered_;
};

}  // namespace amp_mp
