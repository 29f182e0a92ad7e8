// Single tensors into stored formats and back, by the same loops that the optimizers use.
#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>

#include "cpu/passes.h"
#include "torch/device.h"
#include "torch/ops.h"

namespace amp_mp {
namespace {

// Checks that the tensors are contiguous and as wide as the format.
Array stored_array(const at::Tensor& data, const std::optional<at::Tensor>& rest, Format format) {
  check_writable(data, {"data"});
  TORCH_CHECK_VALUE(data.is_contiguous() && data.element_size() == width_of(format),
                    "amp_mp: ", "data (", describe(data), ") must be contiguous, ",
                    width_of(format), " bytes an element");
  const bool groups = format == Format::m8, two = groups || is_split(format);
  TORCH_CHECK_VALUE(rest.has_value() == two, "amp_mp: format ", kFormatNames[int(format)],
                    two ? " has two arrays" : " has one array", ", ", two ? "one" : "two",
                    " given");
  if (!two) return {data.mutable_data_ptr(), format};
  check_writable(*rest, {"rest"});
  check_device(*rest, data.device(), {"rest"});
  const int64_t count = groups ? data.numel() / kGroup : data.numel();
  const bool narrow = format == Format::bfloat16_split24 || format == Format::float16_split24;
  TORCH_CHECK_VALUE(!groups || data.numel() % kGroup == 0, "amp_mp: m8 stores groups of ", kGroup,
                    "; data (", describe(data), ") has another number of elements");
  TORCH_CHECK_VALUE(
      rest->is_contiguous() && rest->numel() == count && rest->element_size() == (narrow ? 1 : 2),
      "amp_mp: rest (", describe(*rest), ") must have ", count, " elements of ", narrow ? 1 : 2,
      " bytes for data of ", data.numel());
  return {data.mutable_data_ptr(), format, rest->mutable_data_ptr()};
}

void transfer(const Transfer& t, const at::Device& device) {
  on(
      device, [&] { cpu::copy(&t, 1, 1.0, at::get_num_threads()); },
      AMP_MP_CUDA(copy(&t, 1, nullptr, 1.0, stream)));
}

}  // namespace

void encode_(const at::Tensor& x, const at::Tensor& data, const std::optional<at::Tensor>& rest,
             Format format, uint64_t seed, int64_t step, int64_t tensor_index) {
  check_plain(x, {"x"});
  check_dtype(x, at::kFloat, {"x"});
  check_device(data, x.device(), {"data"});
  TORCH_CHECK_VALUE(x.is_contiguous() && x.numel() == data.numel(), "amp_mp: x (", describe(x),
                    ") must be contiguous and have as many elements as data");
  const Array to = stored_array(data, rest, format);
  const RandomStream random = random_stream(seed, double(step), uint32_t(tensor_index), false);
  transfer({x.numel(), to, array_of(x, {"x"}), saturates(format), random}, x.device());
  bump_version(data);
  if (rest.has_value()) bump_version(*rest);
}

at::Tensor decode(const at::Tensor& data, const std::optional<at::Tensor>& rest, Format format) {
  const Array from = stored_array(data, rest, format);
  at::Tensor x = at::empty_like(data, data.options().dtype(at::kFloat));
  const Array to = {x.mutable_data_ptr(), Format::float32};
  transfer({x.numel(), to, from, false, {}}, data.device());
  return x;
}

}  // namespace amp_mp
