// Encodes and decodes single tensors with the same loops as the optimizers.
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
  const FormatInfo& info = kFormats[int(format)];
  TORCH_CHECK_VALUE(data.is_contiguous() && data.element_size() == info.width, "amp_mp: ", "data (",
                    describe(data), ") must be contiguous, ", info.width, " bytes an element");
  const bool groups = info.is(kGrouped), two = info.rest_width > 0;
  TORCH_CHECK_VALUE(rest.has_value() == two, "amp_mp: format ", info.name,
                    two ? " has two arrays" : " has one array", ", ", two ? "one" : "two",
                    " given");
  if (!two) return {data.mutable_data_ptr(), format};
  check_writable(*rest, {"rest"});
  check_device(*rest, data.device(), {"rest"});
  const int64_t count = groups ? data.numel() / kGroup : data.numel();
  TORCH_CHECK_VALUE(!groups || data.numel() % kGroup == 0, "amp_mp: ", info.name,
                    " stores groups of ", kGroup, "; data (", describe(data),
                    ") has another number of elements");
  TORCH_CHECK_VALUE(
      rest->is_contiguous() && rest->numel() == count && rest->element_size() == info.rest_width,
      "amp_mp: rest (", describe(*rest), ") must have ", count, " elements of ", info.rest_width,
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
             Format format, uint64_t seed, int64_t step, int64_t tensor_index,
             const Origin& origin) {
  check_plain(x, {"x"});
  check_dtype(x, at::kFloat, {"x"});
  check_device(data, x.device(), {"data"});
  TORCH_CHECK_VALUE(x.is_contiguous() && x.numel() == data.numel(), "amp_mp: x (", describe(x),
                    ") must be contiguous and have as many elements as data");
  const Array to = stored_array(data, rest, format);
  const RandomStream random = random_stream(seed, double(step), uint32_t(tensor_index), false);
  transfer({x.numel(), to, array_of(x, {"x"}), saturates(format), random, origin}, x.device());
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
