#include "torch/checks.h"

#include <ATen/EmptyTensor.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <sstream>

#include "cuda/passes.h"

namespace amp_mp {

std::string Label::text() const {
  if (name) return std::string(argument) + " of " + *name;
  return index < 0 ? argument : std::string(argument) + "[" + std::to_string(index) + "]";
}

std::string describe(const at::Tensor& t) {
  std::ostringstream out;
  out << "shape " << t.sizes() << ", dtype " << t.scalar_type() << ", device " << t.device();
  return out.str();
}

bool is_subclass(const at::Tensor& t) {
  // Not at::isTensorSubclassLike, which says yes to every tensor while a dispatch mode is on.
  return t.unsafeGetTensorImpl()->is_python_dispatch() ||
         t.key_set().has_any(at::kFunctorchWrappedTensors);
}

bool has_memory(const at::Tensor& t) {
  if (t.numel() == 0) return true;
  const auto offset = size_t(t.storage_offset());
  return !t._is_zerotensor() &&
         t.storage().nbytes() >=
             at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size(), offset);
}

bool is_native_gradient(const at::Tensor& grad, const at::Device& device) {
  const bool is_here = grad.is_cpu() || (grad.is_cuda() && cuda::is_built());
  return !is_subclass(grad) && grad.layout() == at::kStrided && is_here &&
         grad.device() == device &&
         (is_low(grad.scalar_type()) || grad.scalar_type() == at::kFloat) &&
         grad.is_non_overlapping_and_dense() && !grad.is_neg() && has_memory(grad) &&
         !grad.is_inference();
}

at::Tensor doubles_on_host(const at::Tensor& t) {
  const bool is_dense = t.layout() == at::kStrided && t.is_cpu() && t.scalar_type() == at::kDouble;
  if (is_dense && has_memory(t) && t.is_contiguous() && !t.is_neg()) return t;
  const at::Tensor given = with_memory(t.detach());
  TORCH_CHECK_VALUE(given.layout() != at::kStrided || given.is_meta() || has_memory(given),
                    "amp_mp: a tensor of numbers (", describe(t),
                    ") has no memory for its elements: its storage was made smaller");
  return given.to(at::kCPU, at::kDouble).resolve_neg().contiguous();
}

at::Tensor with_memory(const at::Tensor& t) {
  return t.defined() && t._is_zerotensor() ? at::zeros(t.sizes(), t.options()) : t;
}

void check_plain(const at::Tensor& t, const Label& label) {
  TORCH_CHECK_TYPE(t.defined(), "amp_mp: ", label.text(), " is None; a tensor is needed");
  TORCH_CHECK_TYPE(
      !is_subclass(t), "amp_mp: ", label.text(), " (", t.sizes(),
      ") is a tensor subclass (DTensor, FakeTensor, a functorch wrapper, ...) without memory "
      "of its own; pass plain tensors, for a DTensor its .to_local()");
  TORCH_CHECK_TYPE(t.layout() == at::kStrided, "amp_mp: ", label.text(), " (", describe(t),
                   ") has layout ", t.layout(),
                   "; only dense tensors are supported (for an embedding: sparse=False)");
  TORCH_CHECK_TYPE(t.is_cpu() || t.is_cuda(), "amp_mp: ", label.text(), " (", describe(t),
                   ") is neither on a CPU nor on a CUDA device");
  TORCH_CHECK_VALUE(has_memory(t), "amp_mp: ", label.text(), " (", describe(t),
                    ") has no memory for its elements: it is a ZeroTensor, or its storage was made "
                    "smaller; pass a tensor as torch.zeros makes it");
}

namespace {

template <class Second>
constexpr at::ScalarType kSecondDtype = c10::CppTypeToScalarType<Second>::value;
template <>
constexpr at::ScalarType kSecondDtype<NoSecond> = at::ScalarType::Undefined;
template <>
constexpr at::ScalarType kSecondDtype<TwoNibbles> = at::kByte;
template <>
constexpr at::ScalarType kSecondDtype<bfloat16> = at::kBFloat16;
template <>
constexpr at::ScalarType kSecondDtype<float16> = at::kHalf;

}  // namespace

at::ScalarType dtype_of(Format format) {
#define AMP_MP_DTYPE(name, element, dtype, second, properties) at::k##dtype,
  constexpr at::ScalarType dtypes[] = {AMP_MP_FOR_EACH_FORMAT(AMP_MP_DTYPE)};
#undef AMP_MP_DTYPE
  return dtypes[size_t(format)];
}

at::ScalarType second_dtype_of(Format format) {
#define AMP_MP_DTYPE(name, element, dtype, second, properties) kSecondDtype<second>,
  constexpr at::ScalarType dtypes[] = {AMP_MP_FOR_EACH_FORMAT(AMP_MP_DTYPE)};
#undef AMP_MP_DTYPE
  return dtypes[size_t(format)];
}

std::optional<ArrayTensors> master_in(const at::Tensor& param, const at::Tensor& master) {
  const bool is_whole = master.scalar_type() == at::kFloat;
  const at::Tensor &data = is_whole ? master : param, &second = is_whole ? param : master;
  for (int f = 0; f < kFormatCount; ++f)
    if (kFormats[f].is(kSplit) && dtype_of(Format(f)) == data.scalar_type() &&
        second_dtype_of(Format(f)) == second.scalar_type())
      return ArrayTensors{data, Format(f), second};
  return std::nullopt;
}

Format check_format(const at::Tensor& t, const Label& label) {
  switch (t.scalar_type()) {
    case at::kFloat: return Format::float32;
    case at::kHalf: return Format::float16;
    case at::kBFloat16: return Format::bfloat16;
    default: break;
  }
  TORCH_CHECK_TYPE(false, "amp_mp: ", label.text(), " (", describe(t),
                   ") must be float32, float16 or bfloat16; use torch.optim for other dtypes");
}

Array array_of(const at::Tensor& t, const Label& label) {
  return {const_cast<void*>(t.const_data_ptr()), check_format(t, label)};
}

void check_writable(const at::Tensor& t, const Label& label) {
  check_plain(t, label);
  TORCH_CHECK_VALUE(t.is_non_overlapping_and_dense() && !t.is_neg(), "amp_mp: ", label.text(), " (",
                    describe(t), ", strides ", t.strides(),
                    ") is a view with gaps or repeated elements; pass a contiguous tensor");
  TORCH_CHECK(!t.is_inference(), "amp_mp: ", label.text(), " (", describe(t),
              ") is an inference tensor, which cannot be updated; create it outside "
              "torch.inference_mode()");
}

void check_device(const at::Tensor& t, const at::Device& device, const Label& label) {
  TORCH_CHECK_VALUE(t.device() == device, "amp_mp: ", label.text(), " (", describe(t),
                    ") must be on ", device, " like the tensors it goes with");
}

void check_dtype(const at::Tensor& t, at::ScalarType dtype, const Label& label) {
  TORCH_CHECK_TYPE(t.scalar_type() == dtype, "amp_mp: ", label.text(), " (", describe(t),
                   ") must be ", dtype);
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  if (a.strides() == b.strides() || a.numel() == 0) return true;
  for (int64_t d = 0; d < a.dim(); ++d)
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  return true;
}

void check_same_layout(const at::Tensor& t, const at::Tensor& like, const Label& label,
                       const Label& like_label) {
  check_same_sizes(t, like, label, like_label);
  TORCH_CHECK_VALUE(same_layout(t, like), "amp_mp: ", label.text(), " has strides ", t.strides(),
                    ", but ", like_label.text(), " has strides ", like.strides(),
                    "; create it with torch.empty_like(..., memory_format=torch.preserve_format)");
}

void check_same_sizes(const at::Tensor& t, const at::Tensor& like, const Label& label,
                      const Label& like_label) {
  TORCH_CHECK_VALUE(t.sizes() == like.sizes(), "amp_mp: ", label.text(), " has shape ", t.sizes(),
                    ", but ", like_label.text(), " has shape ", like.sizes());
}

const at::Tensor& laid_out_as(const at::Tensor& like, const at::Tensor& t, Tensors& kept) {
  if (t.device() == like.device() && same_layout(t, like) && !t.is_neg()) return t;
  const auto options = t.options().device(like.device());
  return kept.emplace_back(at::empty_strided(like.sizes(), like.strides(), options).copy_(t));
}

void check_no_overlap(const std::vector<std::pair<at::Tensor, Label>>& written) {
  struct Range {
    uintptr_t begin, end;
    size_t owner;
  };
  std::vector<Range> ranges;
  ranges.reserve(written.size());
  for (size_t i = 0; i < written.size(); ++i) {
    const at::Tensor& t = written[i].first;
    const auto begin = reinterpret_cast<uintptr_t>(t.const_data_ptr());
    if (t.numel() > 0) ranges.push_back({begin, begin + t.nbytes(), i});
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].begin >= ranges[i - 1].end) continue;
    const auto& [one, name] = written[ranges[i - 1].owner];
    const auto& [other, other_name] = written[ranges[i].owner];
    TORCH_CHECK_VALUE(!one.is_same(other), "amp_mp: ", name.text(), " and ", other_name.text(),
                      " are one tensor, which would be written twice; leave out one of them");
    TORCH_CHECK_VALUE(false, "amp_mp: ", name.text(), " and ", other_name.text(),
                      " share memory; both would be written. Tie weights by using one Parameter "
                      "in both modules, not by sharing storage");
  }
}

void bump_version(const at::Tensor& t) { t.unsafeGetTensorImpl()->bump_version(); }

}  // namespace amp_mp
