#pragma once
// Checks of tensors that hold a few numbers, and pointers to their memory.
#include <optional>

#include "torch/device.h"

namespace amp_mp {

inline void check_one_number(const at::Tensor& t, const at::Device& device, at::ScalarType dtype,
                             const char* argument) {
  check_plain(t, {argument});
  check_device(t, device, {argument});
  check_dtype(t, dtype, {argument});
  TORCH_CHECK_VALUE(t.numel() == 1, "amp_mp: ", argument, " must have one element, found ",
                    describe(t));
}

inline const float* optional_float(const std::optional<at::Tensor>& t, const at::Device& device,
                                   const char* argument) {
  if (!t.has_value()) return nullptr;
  check_one_number(*t, device, at::kFloat, argument);
  return t->const_data_ptr<float>();
}

template <class T>
T* check_doubles(const at::Tensor& t, const char* argument, int64_t least) {
  check_writable(t, {argument});
  check_dtype(t, at::kDouble, {argument});
  TORCH_CHECK_VALUE(t.numel() >= least && t.is_contiguous(), "amp_mp: ", argument, " must hold ",
                    least, " contiguous numbers, found ", describe(t));
  return reinterpret_cast<T*>(t.mutable_data_ptr<double>());
}

inline Verdict* verdict_of(const at::Tensor& t, const at::Device& device) {
  check_device(t, device, {"verdict"});
  return check_doubles<Verdict>(t, "verdict", sizeof(Verdict) / sizeof(double));
}

}  // namespace amp_mp
