// Gradients of embeddings on a CPU. torch's kernels add the rows of a token in the weight's own
// precision, so that ones add up to 256 in bfloat16; these sum in float32 and round once.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/_embedding_bag_dense_backward_cpu_dispatch.h>
#include <ATen/ops/embedding_dense_backward_cpu_dispatch.h>
#include <ATen/ops/zeros.h>

#include <numeric>

#include "torch/products/products.h"

namespace amp_mp::products {
namespace {

using at::Tensor;

// The places of each row's tokens: those of row r are order[from[r]] to order[from[r + 1] - 1].
struct Places {
  std::vector<int64_t> from, order;

  Places(const Tensor& indices, int64_t rows, int64_t padding) : from(size_t(rows + 2)) {
    const int64_t* token = indices.const_data_ptr<int64_t>();
    const int64_t count = indices.numel();
    for (int64_t i = 0; i < count; ++i) {
      TORCH_CHECK_INDEX(token[i] >= 0 && token[i] < rows,
                        "index out of range of the embedding's rows: ", token[i]);
      if (token[i] != padding) ++from[size_t(token[i] + 2)];
    }
    std::partial_sum(from.begin(), from.end(), from.begin());
    order.resize(size_t(from.back()));
    for (int64_t i = 0; i < count; ++i)
      if (token[i] != padding) order[size_t(from[size_t(token[i] + 1)]++)] = i;
  }
};

template <class Low>
void sum_rows(const Tensor& out, const Tensor& grad, const Places& places, bool by_frequency) {
  const int64_t rows = out.size(0), width = out.size(1);
  const Low* from = grad.const_data_ptr<Low>();
  Low* to = out.mutable_data_ptr<Low>();
  const int64_t grain =
      std::max<int64_t>(1, at::internal::GRAIN_SIZE / std::max<int64_t>(1, width));
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> sums(static_cast<size_t>(width));
    for (int64_t row = begin; row < end; ++row) {
      const int64_t first = places.from[size_t(row)], last = places.from[size_t(row + 1)];
      if (first == last) continue;
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int64_t i = first; i < last; ++i) {
        const Low* own = from + places.order[size_t(i)] * width;
        for (int64_t j = 0; j < width; ++j) sums[size_t(j)] += float(own[j]);
      }
      const float divisor = by_frequency ? float(last - first) : 1.0f;
      for (int64_t j = 0; j < width; ++j) to[row * width + j] = Low(sums[size_t(j)] / divisor);
    }
  });
}

Tensor embedding_gradient(const Tensor& grad, const Tensor& indices, int64_t rows, int64_t padding,
                          bool by_frequency) {
  if (!is_low(grad.scalar_type()))
    return at::cpu::embedding_dense_backward(grad, indices, rows, padding, by_frequency);
  const Places places(indices.to(at::kLong).contiguous(), rows, padding);
  const Tensor own = grad.contiguous(), out = at::zeros({rows, grad.size(-1)}, grad.options());
  AT_DISPATCH_REDUCED_FLOATING_TYPES(grad.scalar_type(), "embedding_gradient",
                                     [&] { sum_rows<scalar_t>(out, own, places, by_frequency); });
  return out;
}

// The gradient of an embedding bag, by torch's float32 kernel, which knows the bags' modes.
Tensor bag_gradient(const Tensor& grad, const Tensor& indices, const Tensor& bags,
                    const Tensor& sizes, const Tensor& largest, int64_t rows, bool by_frequency,
                    int64_t mode, const std::optional<Tensor>& weights, int64_t padding) {
  const bool low = is_low(grad.scalar_type());
  const std::optional<Tensor> factors =
      low && weights && weights->defined() ? weights->to(at::kFloat) : weights;
  const Tensor found =
      at::cpu::_embedding_bag_dense_backward(low ? grad.to(at::kFloat) : grad, indices, bags, sizes,
                                             largest, rows, by_frequency, mode, factors, padding);
  return found.to(grad.scalar_type());
}

}  // namespace

void replace_embeddings(torch::Library& aten) {
  aten.impl("embedding_dense_backward", embedding_gradient);
  aten.impl("_embedding_bag_dense_backward", bag_gradient);
}

}  // namespace amp_mp::products
