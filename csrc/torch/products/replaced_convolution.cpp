// Convolutions in float32: some samples at a time, so that no whole activation is converted.
#include <ATen/ops/convolution_backward_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/convolution_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "torch/products/products.h"

namespace amp_mp::products {
namespace {

using at::IntArrayRef;
using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Of `samples` of so many elements as many as are converted at a time: their float32 numbers stay
// in the L2 cache, unless the weight, which oneDNN orders for every call, takes longer.
int64_t samples_at_a_time(int64_t samples, int64_t elements, const Tensor& weight) {
  const int64_t block = std::clamp(2 * weight.numel(), kBlock / 4, 8 * kBlock);
  return slices_of_block(samples, elements, block);
}

bool is_convolved(const Tensor& input, const Tensor& weight) {
  return in_float32(input.scalar_type()) && weight.scalar_type() == input.scalar_type() &&
         input.layout() == at::kStrided && weight.layout() == at::kStrided &&
         input.dim() == weight.dim() && input.numel() > 0;
}

Tensor convolution(const Tensor& input, const Tensor& weight, const MaybeTensor& bias,
                   IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed,
                   IntArrayRef output_padding, int64_t groups) {
  const auto compute = [&](const Tensor& x, const Tensor& w, const MaybeTensor& b) {
    return at::compositeexplicitautograd::convolution(x, w, b, stride, padding, dilation,
                                                      transposed, output_padding, groups);
  };
  const bool has_bias = bias && bias->defined();
  if (!is_convolved(input, weight) || (has_bias && bias->scalar_type() != input.scalar_type()))
    return compute(input, weight, bias);
  const Tensor w = weight.to(at::kFloat);
  const MaybeTensor b = has_bias ? bias->to(at::kFloat) : bias;
  const int64_t samples = input.size(0),
                some = samples_at_a_time(samples, input[0].numel(), weight);
  Tensor out;
  for (int64_t first = 0; first < samples; first += some) {
    const int64_t count = std::min(some, samples - first);
    const Tensor found = compute(input.narrow(0, first, count).to(at::kFloat), w, b);
    if (count == samples) return found.to(input.scalar_type());
    if (!out.defined()) {
      auto sizes = found.sizes().vec();
      sizes[0] = samples;
      out = at::empty(sizes, input.options(), found.suggest_memory_format());
    }
    out.narrow(0, first, count).copy_(found);
  }
  return out;
}

using Gradients = std::tuple<Tensor, Tensor, Tensor>;

Gradients convolution_backward(const Tensor& grad, const Tensor& input, const Tensor& weight,
                               at::OptionalIntArrayRef bias_sizes, IntArrayRef stride,
                               IntArrayRef padding, IntArrayRef dilation, bool transposed,
                               IntArrayRef output_padding, int64_t groups,
                               std::array<bool, 3> wanted) {
  const auto compute = [&](const Tensor& g, const Tensor& x, const Tensor& w) {
    return at::compositeexplicitautograd::convolution_backward(
        g, x, w, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, wanted);
  };
  if (!is_convolved(input, weight) || grad.scalar_type() != input.scalar_type())
    return compute(grad, input, weight);
  const Tensor w = weight.to(at::kFloat);
  const int64_t samples = input.size(0), elements = std::max(input[0].numel(), grad[0].numel()),
                some = samples_at_a_time(samples, elements, weight);
  Tensor dx, dw, db;
  for (int64_t first = 0; first < samples; first += some) {
    const int64_t count = std::min(some, samples - first);
    auto [x, own_dw, own_db] = compute(grad.narrow(0, first, count).to(at::kFloat),
                                       input.narrow(0, first, count).to(at::kFloat), w);
    if (wanted[0]) {
      if (!dx.defined()) dx = at::empty(input.sizes(), input.options(), x.suggest_memory_format());
      dx.narrow(0, first, count).copy_(x);
    }
    if (wanted[1]) dw = dw.defined() ? dw.add_(own_dw) : own_dw;
    if (wanted[2]) db = db.defined() ? db.add_(own_db) : own_db;
  }
  const auto low = [&](const Tensor& t) { return t.defined() ? t.to(input.scalar_type()) : t; };
  return {dx, low(dw), low(db)};
}

}  // namespace

void replace_convolution(torch::Library& aten) {
  aten.impl("convolution", convolution);
  aten.impl("convolution_backward", convolution_backward);
}

}  // namespace amp_mp::products
