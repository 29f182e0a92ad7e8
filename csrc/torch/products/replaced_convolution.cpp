// Convolutions in float32: some samples at a time, so that no whole activation is converted.
#include <ATen/Parallel.h>
#include <ATen/ops/convolution_backward_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/convolution_compositeexplicitautograd_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "cpu/kernels.h"
#include "torch/products/products.h"

namespace amp_mp::products {
namespace {

using at::IntArrayRef;
using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// With so many multiplications the fixed time of a call of oneDNN is small.
constexpr int64_t kWork = int64_t(1) << 28;

// How many of the input's samples, each with so many elements, are converted at a time: their
// float32 numbers stay in the L2 cache, unless these would be too few for the time that oneDNN
// takes for every call and for ordering the weight.
int64_t samples_at_a_time(const Tensor& input, int64_t elements, const Tensor& weight) {
  const int64_t positions = input.numel() / (input.size(0) * input.size(1)),
                some = kWork / std::max<int64_t>(positions * weight.numel(), 1);
  const int64_t block = std::max({kBlock / 4, 2 * weight.numel(), some * elements});
  return slices_of_block(input.size(0), elements, std::min(block, 8 * kBlock));
}

bool is_convolved(const Tensor& input, const Tensor& weight) {
  return in_float32(input.scalar_type()) && weight.scalar_type() == input.scalar_type() &&
         input.layout() == at::kStrided && weight.layout() == at::kStrided &&
         input.dim() == weight.dim() && input.numel() > 0;
}

// From so many channels on oneDNN convolves float32 faster if they lie beside each other.
constexpr int64_t kManyChannels = 16;

// [samples, channels, positions...] in low precision, and in float32 with the channels beside each
// other: `transpose` reads the one and writes the other.
void transpose_channels(const Tensor& low, const Tensor& wide,
                        void (*transpose)(const Transposed&)) {
  constexpr int64_t kPart = 256;  // positions
  const int64_t samples = low.size(0), channels = low.size(1),
                positions = low.numel() / (samples * channels),
                parts = (positions + kPart - 1) / kPart;
  const Array array = array_of(low, {"tensor"});
  auto* numbers = static_cast<c10::Half*>(array.data);
  auto* floats = wide.data_ptr<float>();
  at::parallel_for(0, samples * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t sample = i / parts * positions * channels, first = i % parts * kPart;
      transpose({array.format, channels, std::min(kPart, positions - first),
                 numbers + sample + first, positions, floats + sample + first * channels,
                 channels});
    }
  });
}

// A dense tensor in float32, with its channels beside each other.
Tensor by_channels(const Tensor& low) {
  Tensor wide =
      at::empty(low.sizes(), low.options().dtype(at::kFloat), at::MemoryFormat::ChannelsLast);
  transpose_channels(low, wide, cpu::kernels()->widen_transposed);
  return wide;
}

Tensor convolve(const Tensor& input, const Tensor& weight, const MaybeTensor& bias,
                IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed,
                IntArrayRef output_padding, int64_t groups) {
  const auto compute = [&](const Tensor& x, const Tensor& w, const MaybeTensor& b) {
    return at::compositeexplicitautograd::convolution(x, w, b, stride, padding, dilation,
                                                      transposed, output_padding, groups);
  };
  const bool has_bias = bias && bias->defined();
  if (!is_convolved(input, weight) || (has_bias && bias->scalar_type() != input.scalar_type()))
    return compute(input, weight, bias);
  // Torch convolves 1-d as 2-d as well, but would move the channels apart for it.
  const std::array sizes{stride, padding, dilation, output_padding};
  if (input.dim() == 3 && std::ranges::all_of(sizes, [](IntArrayRef s) { return s.size() == 1; })) {
    const auto two = [](int64_t first, IntArrayRef second) { return std::array{first, second[0]}; };
    return convolve(input.unsqueeze(2), weight.unsqueeze(2), bias, two(1, stride), two(0, padding),
                    two(1, dilation), transposed, two(0, output_padding), groups)
        .squeeze(2);
  }
  const bool transposes = !transposed && groups == 1 && input.dim() == 4 &&
                          std::min(input.size(1), weight.size(0)) >= kManyChannels &&
                          input.is_contiguous() && weight.is_contiguous();
  const auto widen = [&](const Tensor& t) {
    return transposes ? by_channels(t) : t.to(at::kFloat);
  };
  const Tensor w = widen(weight);
  const MaybeTensor b = has_bias ? bias->to(at::kFloat) : bias;
  const int64_t samples = input.size(0),
                some = samples_at_a_time(input, input.numel() / samples, weight);
  Tensor out;
  for (int64_t first = 0; first < samples; first += some) {
    const int64_t count = std::min(some, samples - first);
    const Tensor found = compute(widen(input.narrow(0, first, count)), w, b);
    if (!out.defined()) {
      auto sizes = found.sizes().vec();
      sizes[0] = samples;
      out = at::empty(sizes, input.options(),
                      transposes ? at::MemoryFormat::Contiguous : found.suggest_memory_format());
    }
    const Tensor part = out.narrow(0, first, count);
    if (transposes && found.is_contiguous(at::MemoryFormat::ChannelsLast))
      transpose_channels(part, found, cpu::kernels()->round_transposed);
    else
      part.copy_(found);
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
  const int64_t samples = input.size(0), elements = std::max(input.numel(), grad.numel()) / samples,
                some = samples_at_a_time(input, elements, weight);
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
  aten.impl("convolution", convolve);
  aten.impl("convolution_backward", convolution_backward);
}

}  // namespace amp_mp::products
