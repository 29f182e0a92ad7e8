// Layer norms of low-precision tensors on a CPU, and RMS norms. torch's kernels add up the
// gradients of weight and bias in low precision, so that ones add up to 256 in bfloat16, and an RMS
// norm is seven operators; these sum in float32, convert in registers and round once.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_fused_rms_norm.h>
#include <ATen/ops/_fused_rms_norm_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_layer_norm_backward_cpu_dispatch.h>
#include <ATen/ops/native_layer_norm_cpu_dispatch.h>
#include <ATen/ops/rms_norm_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>

#include "cpu/kernels.h"
#include "torch/products/products.h"

namespace amp_mp::products {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

Array array(const Tensor& t) { return t.defined() ? array_of(t, {"tensor"}) : Array{}; }

// A weight or bias of one of the formats, dense; undefined if there is none.
Tensor dense(const MaybeTensor& t) { return t && t->defined() ? t->contiguous() : Tensor(); }

// Whether the loops take a norm over the last dimensions of x, of this shape; x has one of the
// formats.
bool is_norm(const Tensor& x, at::IntArrayRef shape, const MaybeTensor& weight,
             const MaybeTensor& bias) {
  const auto fits = [&](const MaybeTensor& t) {
    return !t || !t->defined() ||
           ((t->scalar_type() == x.scalar_type() || t->scalar_type() == at::kFloat) &&
            t->sizes() == shape);
  };
  return x.sizes().size() >= shape.size() &&
         x.sizes().slice(x.sizes().size() - shape.size()) == shape && x.numel() > 0 &&
         x.layout() == at::kStrided && fits(weight) && fits(bias);
}

// Elements of a thread's part, at least.
constexpr int64_t kElements = 8192;

// y, and the mean, unless it is an RMS norm, and the scale of each row.
Three norm_rows(const Tensor& input, int64_t dims, const MaybeTensor& weight,
                const MaybeTensor& bias, double eps, bool centred) {
  const Tensor x = input.contiguous(), w = dense(weight), b = dense(bias), y = at::empty_like(x);
  auto sizes = input.sizes().vec();
  std::fill(sizes.end() - dims, sizes.end(), 1);
  const Tensor scale = at::empty(sizes, x.options().dtype(at::kFloat)),
               mean = centred ? at::empty_like(scale) : Tensor();
  const int64_t rows = scale.numel(), width = x.numel() / rows;
  const Norm norm{width,
                  array(x),
                  array(y),
                  array(w),
                  array(b),
                  centred ? mean.data_ptr<float>() : nullptr,
                  scale.data_ptr<float>(),
                  eps};
  at::parallel_for(0, rows, kElements / width + 1,
                   [&](int64_t begin, int64_t end) { cpu::kernels()->norm(norm, begin, end); });
  return {y, mean, scale};
}

// Gradients of x, weight and bias, as far as they are wanted. mean: undefined of an RMS norm.
Three norm_gradients(const Tensor& grad, const Tensor& input, at::IntArrayRef shape,
                     const Tensor& mean, const Tensor& scale, const MaybeTensor& weight,
                     const MaybeTensor& bias, std::array<bool, 3> wanted) {
  const Tensor x = input.contiguous(), dy = grad.contiguous(), w = dense(weight);
  const Tensor scales = scale.to(at::kFloat).contiguous(),
               means = mean.defined() ? mean.to(at::kFloat).contiguous() : mean;
  const Tensor dx = wanted[0] ? at::empty_like(x) : Tensor();
  const int64_t rows = scales.numel(), width = x.numel() / rows;
  const Norm norm{width,
                  array(x),
                  {},
                  array(w),
                  {},
                  means.defined() ? means.data_ptr<float>() : nullptr,
                  scales.data_ptr<float>(),
                  0.0,
                  array(dy),
                  array(dx)};
  // Parts of the rows, each with its sums, so that their order depends on no thread.
  const int64_t parts = std::clamp<int64_t>(rows * width / (4 * kElements), 1, 16);
  const Tensor sums = at::zeros({2, parts, width}, scales.options());
  const auto sums_of = [&](int which, int64_t part) {
    return wanted[size_t(1 + which)] ? sums[which][part].data_ptr<float>() : nullptr;
  };
  at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part)
      cpu::kernels()->norm_gradients(norm, rows * part / parts, rows * (part + 1) / parts,
                                     sums_of(0, part), sums_of(1, part));
  });
  const auto gradient = [&](int which, const MaybeTensor& of) {
    if (!wanted[size_t(1 + which)] || !of || !of->defined()) return Tensor();
    return sums[which].sum(0).view(shape).to(of->scalar_type());
  };
  return {dx, gradient(0, weight), gradient(1, bias)};
}

Three layer_norm(const Tensor& input, at::IntArrayRef shape, const MaybeTensor& weight,
                 const MaybeTensor& bias, double eps) {
  if (!is_low(input.scalar_type()) || !is_norm(input, shape, weight, bias))
    return at::cpu::native_layer_norm(input, shape, weight, bias, eps);
  return norm_rows(input, int64_t(shape.size()), weight, bias, eps, true);
}

Three layer_norm_backward(const Tensor& grad, const Tensor& input, at::IntArrayRef shape,
                          const Tensor& mean, const Tensor& scale, const MaybeTensor& weight,
                          const MaybeTensor& bias, std::array<bool, 3> wanted) {
  if (!is_low(input.scalar_type()) || !is_norm(input, shape, weight, bias) ||
      grad.scalar_type() != input.scalar_type() || grad.sizes() != input.sizes())
    return at::cpu::native_layer_norm_backward(grad, input, shape, mean, scale, weight, bias,
                                               wanted);
  return norm_gradients(grad, input, shape, mean, scale, weight, bias, wanted);
}

bool is_rms_norm(const Tensor& x, at::IntArrayRef shape, const MaybeTensor& weight) {
  return (is_low(x.scalar_type()) || x.scalar_type() == at::kFloat) &&
         is_norm(x, shape, weight, {});
}

Two fused_rms_norm(const Tensor& input, at::IntArrayRef shape, const MaybeTensor& weight,
                   std::optional<double> eps) {
  if (!is_rms_norm(input, shape, weight))
    return at::compositeimplicitautograd::_fused_rms_norm(input, shape, weight, eps);
  const double least = eps.value_or(std::numeric_limits<float>::epsilon());
  const auto [y, mean, scale] = norm_rows(input, int64_t(shape.size()), weight, {}, least, false);
  return {y, scale};
}

// By torch's operators if the loops do not take the tensors, as float64.
Two fused_rms_norm_backward(const Tensor& grad, const Tensor& input, at::IntArrayRef shape,
                            const Tensor& scale, const MaybeTensor& weight,
                            std::array<bool, 2> wanted) {
  if (is_rms_norm(input, shape, weight) && grad.scalar_type() == input.scalar_type()) {
    const auto [dx, dw, db] =
        norm_gradients(grad, input, shape, {}, scale, weight, {}, {wanted[0], wanted[1], false});
    return {dx, dw};
  }
  const bool has_weight = weight && weight->defined();
  const Tensor unit = input * scale, dy = has_weight ? grad * *weight : grad;
  std::vector<int64_t> last, first;
  for (int64_t dim = 0; dim < input.dim(); ++dim)
    (dim < input.dim() - int64_t(shape.size()) ? first : last).push_back(dim);
  Tensor dx, dw;
  if (wanted[0]) dx = (dy - unit * (dy * unit).mean(last, true)).mul(scale).to(input.scalar_type());
  if (wanted[1] && has_weight)
    dw = (first.empty() ? grad * unit : (grad * unit).sum(first)).to(weight->scalar_type());
  return {dx, dw};
}

// Fuses norms of low-precision tensors with float32 weights, which torch does not. Norms of float32
// stay torch's.
Tensor low_rms_norm(const Tensor& input, c10::SymIntArrayRef shape, const MaybeTensor& weight,
                    std::optional<double> eps) {
  const auto sizes = c10::asIntArrayRefSlowOpt(shape);
  if (!sizes) return at::compositeimplicitautograd::rms_norm_symint(input, shape, weight, eps);
  const bool plain = !is_subclass(input) && !(weight && is_subclass(*weight));  // or a DTensor
  if (plain && is_low(input.scalar_type()) && is_rms_norm(input, *sizes, weight))
    return std::get<0>(at::_fused_rms_norm(input, *sizes, weight, eps));
  return std::get<0>(at::compositeimplicitautograd::_fused_rms_norm(input, *sizes, weight, eps));
}

}  // namespace

void replace_norms(torch::Library& aten) {
  aten.impl("native_layer_norm", layer_norm);
  aten.impl("native_layer_norm_backward", layer_norm_backward);
  aten.impl("_fused_rms_norm", fused_rms_norm);
  aten.impl("_fused_rms_norm_backward", fused_rms_norm_backward);
}

void replace_rms_norm(torch::Library& aten) { aten.impl("rms_norm", low_rms_norm); }

}  // namespace amp_mp::products
