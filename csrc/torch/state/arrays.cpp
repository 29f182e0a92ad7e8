#include "torch/state/arrays.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "torch/ops.h"

namespace amp_mp {
namespace {

at::Tensor flat(const at::Tensor& t) { return t.as_strided({t.numel()}, {1}); }

std::optional<at::Tensor> flat_rest(const at::Tensor& rest) {
  return rest.defined() ? std::optional(flat(rest)) : std::nullopt;
}

int64_t count_of(at::IntArrayRef sizes) {
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  return count;
}

// What takes the place of a format of groups where these do not fit.
Format without_groups(Format format) {
  return kFormats[int(format)].is(kForMoment) ? Format::bfloat16 : Format::ue8m8;
}

}  // namespace

bool has_groups(PyObject* param) {
  std::vector<int64_t> strides = local_of(param).strides().vec();
  const at::Tensor& whole = THPVariable_Unpack(param);  // a DTensor's sizes are the whole tensor's
  const at::IntArrayRef sizes = whole.sizes();
  if (is_dtensor(param)) {
    const auto counts =
        py::cast<std::vector<int64_t>>(python_functions().shards_of(py::handle(param)));
    const auto cuts = [](int64_t count) { return count > 1; };
    if (std::any_of(counts.begin(), counts.end(), cuts)) {  // shards are row-major
      for (size_t d = 0; d < sizes.size(); ++d) strides[d] = count_of(sizes.slice(d + 1));
      const bool between_rows =
          std::none_of(counts.begin() + 1, counts.end(), cuts) && strides[0] % kGroup == 0;
      if (!between_rows && sizes.back() % (kGroup * counts.back()) != 0) return false;
    }
  }
  int64_t dims = 0, longest = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] <= 1) continue;
    ++dims;
    longest = std::max(longest, strides[d]);
  }
  return dims > 1 && whole.numel() > 0 && longest % kGroup == 0;
}

std::vector<int64_t> scale_shape(PyObject* param, const std::optional<std::vector<int64_t>>& part) {
  const at::Tensor local = local_of(param);
  const at::IntArrayRef sizes = THPVariable_Unpack(param).sizes();
  std::vector<int64_t> shape = part.value_or(sizes.vec());
  TORCH_CHECK_VALUE(shape.size() == sizes.size(), "amp_mp: part (", shape, ") must have ",
                    sizes.size(), " dimensions, as the parameter has");
  if (count_of(sizes) >= kGroup && local.is_contiguous()) {
    const int64_t row = count_of(sizes.slice(1));
    if (sizes.back() % kGroup == 0) {
      shape.back() /= kGroup;
      return shape;
    }
    if (row % kGroup == 0) return {shape[0], row / kGroup};
  }
  return {count_of(shape) / kGroup};
}

Format format_beside(Format declared, PyObject* param) {
  const bool grouped = kFormats[int(declared)].is(kGrouped);
  return grouped && !has_groups(param) ? without_groups(declared) : declared;
}

Format native(Format format) {
  return format == Format::bfloat16 ? Format::bfloat16_stochastic : format;
}

Origin origin_of(PyObject* dtensor) {
  const py::object origin = python_functions().origin_of(py::handle(dtensor));
  const auto [first, length, stride] =
      py::cast<std::tuple<int64_t, int64_t, int64_t>>(py::tuple(origin));
  return {first, length, stride};
}

Origin origin_for(PyObject* param, Format format) {
  return is_stochastic(format) && is_dtensor(param) ? origin_of(param) : Origin{};
}

bool lies_like(const at::Tensor& a, const at::Tensor& b) {
  for (int64_t d = 0; d < a.dim(); ++d)
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  return true;
}

at::Tensor placed(const at::Tensor& value, const at::Tensor& param) {
  if (value.device() == param.device() && lies_like(value, param)) return value;
  return at::empty_like(param, param.options().dtype(value.scalar_type())).copy_(value);
}

at::Tensor copy_as(const at::Tensor& value, at::ScalarType dtype, const at::Tensor& local) {
  const at::NoGradGuard no_grad;
  at::Tensor made = at::empty_like(local, local.options().dtype(dtype));
  const bool from_bytes = value.scalar_type() == at::kByte && dtype == at::kShort;
  (from_bytes ? made.unsqueeze(-1).view(at::kByte) : made).copy_(value);
  return made;
}

at::Tensor values_of(const at::Tensor& data, const at::Tensor& rest, Format format) {
  // The result is its memory's only owner, so it is not a view that autograd would have to know.
  const at::AutoDispatchBelowADInplaceOrView plain_views;
  const at::Tensor values = decode(flat(data), flat_rest(rest), format);
  return values.as_strided(data.sizes(), data.strides());
}

void store_values(const at::Tensor& values, const at::Tensor& data, const at::Tensor& rest,
                  Format format, uint64_t seed, int64_t tensor_index, const Origin& origin,
                  int64_t step) {
  const at::NoGradGuard no_grad;
  const bool as_it_is = values.scalar_type() == at::kFloat && values.device() == data.device() &&
                        values.strides() == data.strides();
  at::Tensor given = as_it_is ? values : copy_as(values, at::kFloat, data);
  // These formats have no sign: -0.0 would become a NaN.
  if (format == Format::ue8m8 || format == Format::log8) given = given.add(0.0);
  encode_(flat(given), flat(data), flat_rest(rest), format, seed, step, tensor_index, origin);
}

Arrays new_arrays(Format format, PyObject* param) {
  const FormatInfo& info = kFormats[int(format)];
  const at::Tensor local = local_of(param);
  const at::Tensor data = at::zeros_like(local, local.options().dtype(dtype_of(format)));
  if (info.rest_width == 0) return {data, {}};
  const auto options = local.options().dtype(rest_dtype_of(format));
  if (!info.is(kGrouped)) return {data, at::zeros_like(local, options)};
  return {data, at::zeros(scale_shape(param, local.sizes().vec()), options)};
}

Arrays encoded(const at::Tensor& values, Format format, PyObject* param, uint64_t seed,
               int64_t tensor_index, int64_t step) {
  const at::NoGradGuard no_grad;
  const Arrays arrays = new_arrays(format, param);
  store_values(values, arrays.first, arrays.second, format, seed, tensor_index,
               origin_for(param, format), step);
  return arrays;
}

std::pair<Format, Arrays> converted(PyObject* param, Format declared, Format format,
                                    const at::Tensor& data, const at::Tensor& scales, uint64_t seed,
                                    int64_t tensor_index) {
  const at::Tensor local = local_of(param);
  const Format wanted = format_beside(declared, param);
  // Groups are of neighbours in memory, so another layout has other groups.
  const bool keeps_groups = !scales.defined() || lies_like(data, local);
  const bool is_wanted = format == wanted && keeps_groups;
  const bool copies = is_wanted || !scales.defined();
  const at::Tensor own = copies ? copy_as(data, dtype_of(format), local) : data;
  if (!is_wanted) {
    const at::Tensor values = values_of(own, scales, native(format));
    return {wanted, encoded(values, native(wanted), param, seed, tensor_index)};
  }
  if (!scales.defined()) return {wanted, {own, {}}};
  const at::Tensor moved = scales.detach().to(local.device(), scales.scalar_type(), false, true);
  return {wanted, {own, moved.reshape(scale_shape(param, local.sizes().vec()))}};
}

}  // namespace amp_mp
