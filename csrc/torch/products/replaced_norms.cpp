// Layer norms of low-precision tensors on a CPU. torch's kernels add up the gradients of weight and
// bias in low precision, so that ones add up to 256 in bfloat16; these sum in float32, convert in
// registers and round once.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_layer_norm_backward_cpu_dispatch.h>
#include <ATen/ops/native_layer_norm_cpu_dispatch.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "cpu/kernels.h"
#include "torch/products/products.h"

namespace amp_mp::products {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

Format format_of(const Tensor& t) {
  return t.scalar_type() == at::kHalf       ? Format::float16
         : t.scalar_type() == at::kBFloat16 ? Format::bfloat16
                                            : Format::float32;
}

Array array(const Tensor& t) {
  return t.defined() ? Array{t.data_ptr(), format_of(t)} : Array{nullptr, Format::float32};
}

// A weight or bias of one of the formats, dense; undefined if there is none.
Tensor dense(const MaybeTensor& t) { return t && t->defined() ? t->contiguous() : Tensor(); }

bool is_norm(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, int64_t dims) {
  const at::ScalarType low = x.scalar_type();
  const auto fits = [&](const MaybeTensor& t) {
    return !t || !t->defined() ||
           ((t->scalar_type() == low || t->scalar_type() == at::kFloat) && t->dim() == dims &&
            t->sizes() == x.sizes().slice(size_t(x.dim() - dims)));
  };
  return (low == at::kBFloat16 || low == at::kHalf) && x.dim() >= dims && x.numel() > 0 &&
         x.layout() == at::kStrided && fits(weight) && fits(bias);
}

// Elements of a thread's part, at least.
constexpr int64_t kElements = 8192;

Three layer_norm(const Tensor& input, at::IntArrayRef shape, const MaybeTensor& weight,
                 const MaybeTensor& bias, double eps) {
  const int64_t dims = int64_t(shape.size());
  if (!is_norm(input, weight, bias, dims) ||
      input.sizes().slice(size_t(input.dim() - dims)) != shape)
    return at::cpu::native_layer_norm(input, shape, weight, bias, eps);
  const Tensor x = input.contiguous(), w = dense(weight), b = dense(bias), y = at::empty_like(x);
  auto sizes = input.sizes().vec();
  std::fill(sizes.end() - dims, sizes.end(), 1);
  const Tensor mean = at::empty(sizes, x.options().dtype(at::kFloat)), scale = at::empty_like(mean);
  const int64_t rows = mean.numel(), width = x.numel() / rows;
  const Norm norm{width,
                  array(x),
                  array(y),
                  array(w),
                  array(b),
                  mean.data_ptr<float>(),
                  scale.data_ptr<float>(),
                  eps};
  at::parallel_for(0, rows, kElements / width + 1,
                   [&](int64_t begin, int64_t end) { cpu::kernels()->norm(norm, begin, end); });
  return {y, mean, scale};
}

Three layer_norm_backward(const Tensor& grad, const Tensor& input, at::IntArrayRef shape,
                          const Tensor& mean, const Tensor& scale, const MaybeTensor& weight,
                          const MaybeTensor& bias, std::array<bool, 3> wanted) {
  if (!is_norm(input, weight, bias, int64_t(shape.size())) ||
      grad.scalar_type() != input.scalar_type() || grad.sizes() != input.sizes())
    return at::cpu::native_layer_norm_backward(grad, input, shape, mean, scale, weight, bias,
                                               wanted);
  const Tensor x = input.contiguous(), dy = grad.contiguous(), w = dense(weight);
  const Tensor means = mean.to(at::kFloat).contiguous(), scales = scale.to(at::kFloat).contiguous();
  const Tensor dx = wanted[0] ? at::empty_like(x) : Tensor();
  const int64_t rows = means.numel(), width = x.numel() / rows;
  const Norm norm{
      width, array(x),  {},       array(w), {}, means.data_ptr<float>(), scales.data_ptr<float>(),
      0.0,   array(dy), array(dx)};
  // Parts of the rows, each with its sums, so that their order depends on no thread.
  const int64_t parts = std::clamp<int64_t>(rows * width / (4 * kElements), 1, 16);
  const Tensor sums = at::zeros({2, parts, width}, means.options());
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

}  // namespace

void replace_norms(torch::Library& aten) {
  aten.impl("native_layer_norm", layer_norm);
  aten.impl("native_layer_norm_backward", layer_norm_backward);
}

}  // namespace amp_mp::products
