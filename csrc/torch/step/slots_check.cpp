// The checks of an optimizer's tensors: lengths of lists, dtypes, layouts, devices, shared memory.
#include <limits>

#include "torch/step/slots.h"

namespace amp_mp {
namespace {

void check_length(size_t found, size_t wanted, const char* argument) {
  TORCH_CHECK_VALUE(found == wanted, "amp_mp: ", argument, " has ", found,
                    " elements, but there are ", wanted, " parameters");
}

}  // namespace

at::Device Slots::device_of(const Lists& lists) {
  if (lists.device) return *lists.device;
  const bool has_first = !lists.params.empty() && lists.params[0].defined();
  return has_first ? lists.params[0].device() : at::Device(at::kCPU);
}

void Slots::check_lengths() const {
  const size_t n = own_.params.size();
  check_length(own_.masters.size(), n, "masters");
  check_length(own_.stochastic.size(), n, "stochastic");
  check_length(own_.clocks.size(), n, "clocks");
  check_length(own_.groups.size(), n, "groups");
  check_length(own_.tensor_indices.size(), n, "tensor_indices");
  check_length(own_.firsts.size(), n, "firsts");
  check_length(own_.row_lengths.size(), n, "row_lengths");
  check_length(own_.row_strides.size(), n, "row_strides");
  for (const Tensors& s : own_.states) check_length(s.size(), n, "a list of states");
  for (const Tensors& s : own_.scales) check_length(s.size(), n, "a list of scales");
  for (const auto& f : own_.formats) check_length(f.size(), n, "a list of formats");
  const size_t states = own_.states.size();
  TORCH_CHECK_VALUE(own_.formats.size() == states && own_.scales.size() == states,
                    "amp_mp: ", states, " states, but ", own_.formats.size(),
                    " lists of formats and ", own_.scales.size(), " of scales");
  TORCH_CHECK_VALUE(own_.states.size() <= size_t(kMaxStates), "amp_mp: ", own_.states.size(),
                    " states, at most ", kMaxStates, " are supported");
  TORCH_CHECK_VALUE(device_.is_cpu() || device_.is_cuda(), "amp_mp: device must be a CPU or CUDA ",
                    "device, found ", device_);
  constexpr int64_t kMostGroups = std::numeric_limits<int32_t>::max();
  for (size_t i = 0; i < n; ++i) {
    TORCH_CHECK_VALUE(own_.groups[i] >= (i > 0 ? own_.groups[i - 1] : 0),
                      "amp_mp: groups must ascend from 0 on, found ", own_.groups[i]);
    TORCH_CHECK_VALUE(own_.groups[i] < kMostGroups, "amp_mp: groups[", i, "] must be below ",
                      kMostGroups, ", found ", own_.groups[i]);
    check_plain(own_.params[i], {"the weight", int64_t(i), &own_.names[i]});
    check_origin({own_.firsts[i], own_.row_lengths[i], own_.row_strides[i]}, own_.params[i].numel(),
                 own_.names[i]);
  }
}

void Slots::check_gradient(int64_t i, const at::Tensor& grad) const {
  const std::string* name = &own_.names[size_t(i)];
  const at::Tensor& param = own_.params[size_t(i)];
  const auto label = [&] { return Label{"the gradient", i, name}; };
  if (is_subclass(grad) || grad.layout() != at::kStrided || !has_memory(grad))
    check_plain(grad, label());
  if (grad.device() != device_) check_device(grad, device_, label());
  if (grad.sizes() != param.sizes())
    check_same_layout(grad, param, label(), {"the weight", i, name});
}

void Slots::check_gradients() const {
  for (int64_t i = 0; i < size(); ++i) {
    const at::Tensor& grad = gradient(size_t(i));
    if (!grad.defined()) continue;
    check_gradient(i, with_memory(grad));
    check_format(grad, {"the gradient", i, &own_.names[size_t(i)]});
  }
}

void Slots::check() const {
  std::vector<std::pair<at::Tensor, Label>> written;
  for (int64_t i = 0; i < size(); ++i) {
    const std::string* name = &own_.names[size_t(i)];
    const Label param{"the weight", i, name}, master{"the master", i, name},
        state{"the state", i, name}, scale{"the scales", i, name}, clock{"the step count", i, name};
    const at::Tensor &p = own_.params[i], &m = own_.masters[i], &c = own_.clocks[i];
    const auto check_like_param = [&](const at::Tensor& t, at::ScalarType dtype,
                                      const Label& label) {
      check_writable(t, label);
      check_device(t, device_, label);
      check_dtype(t, dtype, label);
      check_same_layout(t, p, label, param);
      written.emplace_back(t, label);
    };
    const auto check_numbers = [&](const at::Tensor& t, at::ScalarType dtype, int64_t count,
                                   const Label& label) {
      check_writable(t, label);
      check_device(t, device_, label);
      check_dtype(t, dtype, label);
      TORCH_CHECK_VALUE(t.numel() == count && t.is_contiguous(), "amp_mp: ", label.text(),
                        " must hold ", count, " contiguous numbers, found ", describe(t));
      written.emplace_back(t, label);
    };
    check_writable(p, param);
    check_device(p, device_, param);
    check_format(p, param);
    written.emplace_back(p, param);
    if (m.defined()) {
      TORCH_CHECK_VALUE(format_of_master(p, m), "amp_mp: ", master.text(), " (", describe(m),
                        ") does not go with ", param.text(), " (", describe(p), ")");
      check_like_param(m, m.scalar_type(), master);
    }
    for (size_t k = 0; k < own_.states.size(); ++k)
      check_like_param(own_.states[k][i], dtype_of(own_.formats[k][i]), state);
    for (size_t k = 0; k < own_.states.size(); ++k) {
      const Format format = own_.formats[k][i];
      const at::Tensor& s = own_.scales[k][i];
      TORCH_CHECK_VALUE(kFormats[int(format)].is(kForState), "amp_mp: ", state.text(),
                        " cannot be ", kFormats[int(format)].name,
                        ", which is not a format of states");
      if (!kFormats[int(format)].is(kGrouped)) continue;
      TORCH_CHECK_VALUE(
          k < kGroupedStates && s.defined() && p.numel() % kGroup == 0, "amp_mp: ", state.text(),
          " (", describe(p), ") cannot be ", kFormats[int(format)].name,
          ": only a rule's first two states can, with scales, and with a multiple of ", kGroup,
          " elements");
      check_numbers(s, rest_dtype_of(format), p.numel() / kGroup, scale);
    }
    check_numbers(c, at::kDouble, int64_t(sizeof(Clock) / sizeof(double)), clock);
  }
  check_no_overlap(written);
}

}  // namespace amp_mp
