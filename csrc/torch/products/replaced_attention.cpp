// Attention in float32, as torch's fused kernel for a CPU computes it, some samples at a time.
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_cpu_dispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_cpu_dispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "torch/products/products.h"

namespace amp_mp::products {
namespace {

using at::Tensor;
using Mask = std::optional<Tensor>;

bool is_attended(const Tensor& q, const Tensor& k, const Tensor& v) {
  const at::ScalarType low = q.scalar_type();
  return in_float32(low) && k.scalar_type() == low && v.scalar_type() == low && q.dim() == 4 &&
         k.dim() == 4 && v.dim() == 4 && q.numel() > 0;
}

// Calls compute(first, count) for some samples after others: on each thread for its own, which stay
// in its cache, or, where there are fewer samples than threads, with all threads for each block.
template <class Compute>
void by_samples(const Tensor& q, const Tensor& k, const Compute& compute) {
  const int64_t samples = q.size(0), elements = std::max(q[0].numel(), k[0].numel());
  const auto run = [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;  // which threads do not inherit
    const int64_t some = slices_of_block(end - begin, elements, kBlock / 4);  // of eight tensors
    for (int64_t first = begin; first < end; first += some)
      compute(first, std::min(some, end - first));
  };
  if (samples < at::get_num_threads()) return run(0, samples);
  at::parallel_for(0, samples, 1, run);
}

// Some samples of a tensor in float32.
Tensor part(const Tensor& t, int64_t first, int64_t count) {
  return t.narrow(0, first, count).to(at::kFloat);
}

Mask part_of_mask(const Mask& mask, int64_t samples, int64_t first, int64_t count) {
  if (!mask || !mask->defined()) return mask;
  const bool each = mask->dim() == 4 && mask->size(0) == samples && samples > 1;
  const Tensor own = each ? mask->narrow(0, first, count) : *mask;
  return own.scalar_type() == at::kBool ? own : own.to(at::kFloat);
}

// An empty tensor (samples, heads, length, ...) whose heads are beside one another in memory.
Tensor empty_heads(std::vector<int64_t> sizes, const at::TensorOptions& options) {
  std::swap(sizes[1], sizes[2]);
  return at::empty(sizes, options).transpose(1, 2);
}

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                     double dropout, bool causal, const Mask& mask,
                                     std::optional<double> scale) {
  const auto compute = [&](const Tensor& q, const Tensor& k, const Tensor& v, const Mask& mask) {
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, mask,
                                                                scale);
  };
  if (!is_attended(q, k, v)) return compute(q, k, v, mask);
  const int64_t samples = q.size(0);
  const Tensor out = empty_heads({samples, q.size(1), q.size(2), v.size(3)}, q.options()),
               sums = empty_heads({samples, q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  by_samples(q, k, [&](int64_t first, int64_t count) {
    const auto [o, s] = compute(part(q, first, count), part(k, first, count), part(v, first, count),
                                part_of_mask(mask, samples, first, count));
    out.narrow(0, first, count).copy_(o);
    sums.narrow(0, first, count).copy_(s);
  });
  return {out, sums};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(const Tensor& grad, const Tensor& q,
                                                      const Tensor& k, const Tensor& v,
                                                      const Tensor& out, const Tensor& sums,
                                                      double dropout, bool causal, const Mask& mask,
                                                      std::optional<double> scale) {
  const auto compute = [&](const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v,
                           const Tensor& out, const Tensor& sums, const Mask& mask) {
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, sums, dropout, causal, mask, scale);
  };
  if (!is_attended(q, k, v)) return compute(grad, q, k, v, out, sums, mask);
  const int64_t samples = q.size(0);
  const std::array grads = {empty_heads(q.sizes().vec(), q.options()),
                            empty_heads(k.sizes().vec(), q.options()),
                            empty_heads(v.sizes().vec(), q.options())};
  by_samples(q, k, [&](int64_t first, int64_t count) {
    const auto of = [&](const Tensor& t) { return part(t, first, count); };
    const auto [dq, dk, dv] =
        compute(of(grad), of(q), of(k), of(v), of(out), sums.narrow(0, first, count),
                part_of_mask(mask, samples, first, count));
    const std::array found = {dq, dk, dv};
    for (size_t i = 0; i < 3; ++i) grads[i].narrow(0, first, count).copy_(found[i]);
  });
  return {grads[0], grads[1], grads[2]};
}

}  // namespace

void replace_attention(torch::Library& aten) {
  aten.impl("_scaled_dot_product_flash_attention_for_cpu", attention);
  aten.impl("_scaled_dot_product_flash_attention_for_cpu_backward", attention_backward);
}

}  // namespace amp_mp::products
