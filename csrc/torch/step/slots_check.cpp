// The checks of an optimizer's tensors: dtypes, layouts, devices, shared memory.
#include "torch/step/slots.h"
#include "torch/weights/master_tensors.h"

namespace amp_mp {
void Slots::check_gradient(int64_t i, const at::Tensor& grad) const {
  const std::string* name = &own_[size_t(i)].name;
  const at::Tensor& param = params_[size_t(i)];
  const auto label = [&] { return Label{"the gradient", i, name}; };
  if (is_subclass(grad) || grad.layout() != at::kStrided || !has_memory(grad))
    check_plain(grad, label());
  if (grad.device() != device_) check_device(grad, device_, label());
  if (grad.sizes() != param.sizes())
    check_same_sizes(grad, param, label(), {"the weight", i, name});
}

void Slots::check_gradients() const {
  for (int64_t i = 0; i < size(); ++i) {
    const at::Tensor& grad = gradient(size_t(i));
    if (!grad.defined()) continue;
    check_gradient(i, with_memory(grad));
    check_format(grad, {"the gradient", i, &own_[size_t(i)].name});
  }
}

void Slots::check() const {
  std::vector<std::pair<at::Tensor, Label>> written;
  for (int64_t i = 0; i < size(); ++i) {
    const SlotTensors& own = own_[size_t(i)];
    const std::string* name = &own.name;
    const Label param{"the weight", i, name}, master{"the master", i, name},
        state{"the state", i, name}, scale{"the scales", i, name}, clock{"the step count", i, name};
    const at::Tensor &p = own.param, &m = own.master;
    const auto check_written = [&](const at::Tensor& t, const Label& label) {
      check_writable(t, label);
      check_device(t, device_, label);
      written.emplace_back(t, label);
    };
    const auto check_like_param = [&](const at::Tensor& t, at::ScalarType dtype,
                                      const Label& label) {
      check_written(t, label);
      check_dtype(t, dtype, label);
      check_same_layout(t, p, label, param);
    };
    const auto check_numbers = [&](const at::Tensor& t, at::ScalarType dtype, int64_t count,
                                   const Label& label) {
      check_written(t, label);
      check_dtype(t, dtype, label);
      TORCH_CHECK_VALUE(t.numel() == count && t.is_contiguous(), "amp_mp: ", label.text(),
                        " must hold ", count, " contiguous numbers, found ", describe(t));
    };
    check_written(p, param);
    check_format(p, param);
    if (m.defined()) {
      TORCH_CHECK_VALUE(master_in(p, m) && (!is_packed(m) || is_beside(m, p)),
                        "amp_mp: ", master.text(), " (", describe(m), ") does not go with ",
                        param.text(), " (", describe(p), ")");
      if (is_packed(m))
        check_written(m, master);
      else
        check_like_param(m, m.scalar_type(), master);
    }
    for (const ArrayTensors& each : own.states)
      check_like_param(each.data, dtype_of(each.format), state);
    for (size_t k = 0; k < own.states.size(); ++k) {
      const auto& [data, format, s] = own.states[k];
      if (!kFormats[int(format)].is(kGrouped)) continue;
      TORCH_CHECK_VALUE(
          k < kGroupedStates && s.defined() && p.numel() % kGroup == 0, "amp_mp: ", state.text(),
          " (", describe(p), ") cannot be ", kFormats[int(format)].name,
          ": only a rule's first two states can, with scales, and with a multiple of ", kGroup,
          " elements");
      check_numbers(s, second_dtype_of(format), p.numel() / kGroup, scale);
    }
    check_numbers(own.clock, at::kDouble, int64_t(sizeof(Clock) / sizeof(double)), clock);
  }
  check_no_overlap(written);
}

}  // namespace amp_mp
