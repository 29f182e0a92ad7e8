#include "torch/state/arrays.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "cpu/passes.h"
#include "torch/device.h"

namespace amp_mp {
namespace {

// The memory of tensors. Raises unless they are dense, and as wide and as many as the format says.
Array memory_of(const ArrayTensors& tensors) {
  const auto& [data, format, second] = tensors;
  check_writable(data, {"data"});
  const FormatInfo& info = kFormats[int(format)];
  TORCH_CHECK_VALUE(data.element_size() == info.width, "amp_mp: ", "data (", describe(data),
                    ") must be contiguous, ", info.width, " bytes an element");
  const bool two = info.second_width > 0;
  TORCH_CHECK_VALUE(second.defined() == two, "amp_mp: format ", info.name,
                    two ? " has two arrays" : " has one array", ", ", two ? "one" : "two",
                    " given");
  if (!two) return {data.mutable_data_ptr(), format};
  check_writable(second, {"second"});
  check_device(second, data.device(), {"second"});
  const int64_t count = data.numel() / info.group;
  TORCH_CHECK_VALUE(data.numel() % info.group == 0, "amp_mp: ", info.name, " stores groups of ",
                    info.group, "; data (", describe(data), ") has another number of elements");
  TORCH_CHECK_VALUE(second.numel() == count && second.element_size() == info.second_width,
                    "amp_mp: second (", describe(second), ") must have ", count, " elements of ",
                    info.second_width, " bytes for data of ", data.numel());
  return {data.mutable_data_ptr(), format, second.mutable_data_ptr()};
}

void transfer(const Transfer& t, const at::Device& device) {
  on(
      device, [&] { cpu::copy(&t, 1, 1.0, at::get_num_threads()); },
      AMP_MP_CUDA(copy(&t, 1, nullptr, 1.0, stream)));
}

int64_t count_of(at::IntArrayRef sizes) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return count;
}

// The format that replaces a format of groups if groups do not fit.
Format without_groups(Format format) {
  return kFormats[int(format)].is(kForMoment) ? Format::bfloat16 : Format::ue8m8;
}

}  // namespace

bool has_groups(Format format, py::handle param) {
  const int64_t group = kFormats[int(format)].group;
  const at::Tensor local = local_of(param);
  if (is_packed(format) && !local.is_contiguous()) return false;
  std::vector<int64_t> strides = local.strides().vec();
  const at::Tensor& whole = tensor_of(param);  // a DTensor's sizes are the whole tensor's
  const at::IntArrayRef sizes = whole.sizes();
  if (is_dtensor(param)) {
    const std::vector<int64_t> counts = package().shards_of(param);
    const auto cuts = [](int64_t count) { return count > 1; };
    if (std::any_of(counts.begin(), counts.end(), cuts)) {  // shards are row-major
      for (size_t d = 0; d < sizes.size(); ++d) strides[d] = count_of(sizes.slice(d + 1));
      const bool between_rows =
          std::none_of(counts.begin() + 1, counts.end(), cuts) && strides[0] % group == 0;
      if (!between_rows && sizes.back() % (group * counts.back()) != 0) return false;
    }
  }
  int64_t dims = 0, longest = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] <= 1) continue;
    ++dims;
    longest = std::max(longest, strides[d]);
  }
  return dims > 1 && whole.numel() > 0 && longest % group == 0;
}

std::vector<int64_t> second_shape(Format format, py::handle param,
                                  const std::optional<std::vector<int64_t>>& part) {
  const at::Tensor local = local_of(param);
  const at::IntArrayRef sizes = tensor_of(param).sizes();
  const std::vector<int64_t> shape = part.value_or(sizes.vec());
  TORCH_CHECK_VALUE(shape.size() == sizes.size(), "amp_mp: part (", shape, ") must have ",
                    sizes.size(), " dimensions, as the parameter has");
  return grouped_shape(sizes, shape, kFormats[int(format)].group, local.is_contiguous());
}

std::vector<int64_t> grouped_shape(at::IntArrayRef sizes, std::vector<int64_t> part, int64_t group,
                                   bool row_major) {
  if (row_major && !sizes.empty()) {
    const int64_t row = count_of(sizes.slice(1));
    if (sizes.back() % group == 0) {
      part.back() /= group;
      return part;
    }
    if (row % group == 0) return {part[0], row / group};
  }
  return {count_of(part) / group};
}

Format format_beside(Format declared, py::handle param) {
  const bool fits = kFormats[int(declared)].group == 1 || has_groups(declared, param);
  return fits ? declared : without_groups(declared);
}

Format native(Format format) {
  return format == Format::bfloat16 ? Format::bfloat16_stochastic : format;
}

Origin origin_of(py::handle dtensor) {
  const auto [first, length, stride] = package().origin_of(dtensor);
  return {first, length, stride};
}

Origin origin_for(py::handle param, Format format) {
  return is_stochastic(format) && is_dtensor(param) ? origin_of(param) : Origin{};
}

at::Tensor part_of(py::handle value, py::handle param) {
  if (is_plain(value) && !is_dtensor(param)) return tensor_of(value);
  return package().part(value, param);
}

at::Tensor placed(const at::Tensor& value, const at::Tensor& param) {
  if (value.device() == param.device() && same_layout(value, param)) return value;
  return at::empty_like(param, param.options().dtype(value.scalar_type())).copy_(value);
}

at::Tensor copy_as(const at::Tensor& value, at::ScalarType dtype, const at::Tensor& local) {
  const at::AutoDispatchBelowADInplaceOrView no_grad;  // nor a version: the copy is new
  at::Tensor made = at::empty_like(local, local.options().dtype(dtype));
  const bool from_bytes = value.scalar_type() == at::kByte && dtype == at::kShort;
  (from_bytes ? made.unsqueeze(-1).view(at::kByte) : made).copy_(value);
  return made;
}

void copy_array(const ArrayTensors& from, const ArrayTensors& to) {
  const Array source = memory_of(from), target = memory_of(to);
  TORCH_CHECK_VALUE(from.data.numel() == to.data.numel() && from.data.device() == to.data.device(),
                    "amp_mp: an array (", describe(from.data), ") and its copy (",
                    describe(to.data), ") must be of one size and on one device");
  transfer({to.data.numel(), target, source, saturates(to.format), {}}, to.data.device());
}

at::Tensor values_of(const ArrayTensors& from) {
  const at::Tensor values = at::empty_like(from.data, from.data.options().dtype(at::kFloat));
  copy_array(from, {values, Format::float32, {}});
  return values;
}

void store_values(const at::Tensor& values, const ArrayTensors& to, uint64_t seed,
                  int64_t tensor_index, const Origin& origin, int64_t step) {
  const at::NoGradGuard no_grad;
  const bool as_it_is = values.scalar_type() == at::kFloat && values.device() == to.data.device() &&
                        values.strides() == to.data.strides();
  at::Tensor x = as_it_is ? values : copy_as(values, at::kFloat, to.data);
  // These formats have no sign: -0.0 would become a NaN.
  if (to.format == Format::ue8m8 || to.format == Format::log8) x = x.add(0.0);
  check_plain(x, {"x"});
  const Array stored = memory_of(to);
  TORCH_CHECK_VALUE(x.numel() == to.data.numel(), "amp_mp: x (", describe(x),
                    ") must be contiguous and have as many elements as data");
  const RandomStream random =
      random_stream(seed, double(step), uint32_t(tensor_index), is_split(to.format));
  transfer({x.numel(), stored, array_of(x, {"x"}), saturates(to.format), random, origin},
           x.device());
  bump_version(to.data);
  if (to.second.defined()) bump_version(to.second);
}

ArrayTensors new_arrays(Format format, py::handle param) {
  const FormatInfo& info = kFormats[int(format)];
  const at::Tensor local = local_of(param);
  const at::Tensor data = at::zeros_like(local, local.options().dtype(dtype_of(format)));
  if (info.second_width == 0) return {data, format, {}};
  const auto options = local.options().dtype(second_dtype_of(format));
  if (info.group == 1) return {data, format, at::zeros_like(local, options)};
  return {data, format, at::zeros(second_shape(format, param, local.sizes().vec()), options)};
}

ArrayTensors encoded(const at::Tensor& values, Format format, py::handle param, uint64_t seed,
                     int64_t tensor_index, int64_t step) {
  const at::NoGradGuard no_grad;
  const ArrayTensors arrays = new_arrays(format, param);
  store_values(values, arrays, seed, tensor_index, origin_for(param, format), step);
  return arrays;
}

ArrayTensors converted(py::handle param, Format declared, const ArrayTensors& given, uint64_t seed,
                       int64_t tensor_index) {
  const auto& [data, format, scales] = given;
  const at::Tensor local = local_of(param);
  const Format wanted = format_beside(declared, param);
  // The elements of a group are neighbours in memory, so another layout has other groups.
  const bool keeps_groups = !scales.defined() || same_layout(data, local);
  const bool is_wanted = format == wanted && keeps_groups;
  const bool copies = is_wanted || !scales.defined();
  const at::Tensor own = copies ? copy_as(data, dtype_of(format), local) : data;
  if (!is_wanted) {
    ArrayTensors made =
        encoded(values_of({own, format, scales}), native(wanted), param, seed, tensor_index);
    made.format = wanted;
    return made;
  }
  if (!scales.defined()) return {own, wanted, {}};
  const at::Tensor moved = scales.detach().to(local.device(), scales.scalar_type(), false, true);
  return {own, wanted, moved.reshape(second_shape(wanted, param, local.sizes().vec()))};
}

}  // namespace amp_mp
