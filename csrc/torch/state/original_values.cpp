#include "torch/state/original_values.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <limits>

#include "torch/state/live_state.h"

namespace amp_mp {
namespace {

constexpr int64_t kExceptionBytes = 12;  // an int64 index and a float32 value
constexpr double kLargestHalf = 65504;

// The sum of a 16-bit tensor's elements as integers; `by_place` also by their places.
int64_t checksum_of(const at::Tensor& weight, bool by_place) {
  const at::Tensor bits = weight.view(at::kShort);
  if (!by_place) return bits.sum(at::kLong).item<int64_t>();
  uint64_t total = 0;
  for (int64_t dim = 0; dim < std::max<int64_t>(bits.dim(), 1); ++dim) {
    std::vector<int64_t> others;
    for (int64_t d = 0; d < bits.dim(); ++d)
      if (d != dim) others.push_back(d);
    const at::Tensor sums =
        others.empty() ? bits.to(at::kLong) : bits.sum(others, false, at::kLong);
    const at::Tensor places = at::arange(sums.numel(), sums.options()) * 2 + 1;
    total = 31 * total + uint64_t((sums.flatten() * places).sum().item<int64_t>());
  }
  return int64_t(total);
}

ArrayTensors original_in(const at::Tensor& weight, const at::Tensor& rest) {
  const std::optional<ArrayTensors> found = master_in(weight, rest);
  TORCH_CHECK_TYPE(found, "amp_mp: the weight (", describe(weight),
                   ") must be float16 or bfloat16, with remainders of 16 bits, found ",
                   describe(rest));
  return *found;
}

void check_stored(const Tensors& stored) {
  TORCH_CHECK_VALUE(stored.size() == 1 || stored.size() == 3, "amp_mp: stored must have the ",
                    "values, or remainders, indices and values; found ", stored.size(), " tensors");
}

}  // namespace

std::pair<int64_t, Tensors> encode_original(const py::object& weight, const at::Tensor& values,
                                            bool by_place) {
  const at::NoGradGuard no_grad;
  const at::Tensor& own = tensor_of(weight);
  if (!is_plain(weight) || !(own.is_cpu() || own.is_cuda()) || own.numel() == 0)
    return {0, {values}};
  const py::gil_scoped_release release;
  const at::Tensor rest = at::empty_like(own, own.options().dtype(at::kShort));
  const ArrayTensors original = original_in(own, rest);
  store_values(values, {at::empty_like(own), original.format, rest});
  const at::Tensor wrong = values_of(original).view(at::kInt).ne(values.view(at::kInt));
  const at::Tensor indices = wrong.flatten().nonzero().flatten();
  if (kExceptionBytes * indices.numel() > 2 * own.numel()) return {0, {values}};
  return {checksum_of(own, by_place), {rest, indices, values.flatten().index_select(0, indices)}};
}

at::Tensor decode_original(const at::Tensor& weight, const Tensors& stored) {
  const at::NoGradGuard no_grad;
  check_stored(stored);
  if (stored.size() == 1) return copy_as(stored[0], at::kFloat, weight);
  const at::Tensor rest = placed(stored[0], weight);
  at::Tensor found = values_of(original_in(weight, rest));
  if (stored[1].numel() == 0) return found;
  const at::Device device = weight.device();
  const at::Tensor corrected =
      found.flatten().index_copy(0, stored[1].to(device), stored[2].to(device));
  return found.copy_(corrected.view(found.sizes()));
}

bool is_rounded_original(const at::Tensor& weight, const Tensors& stored, int64_t checksum,
                         bool by_place) {
  const at::NoGradGuard no_grad;
  check_stored(stored);
  const at::Tensor& first = stored[0];
  if (weight.sizes() != first.sizes() || !is_low_precision(weight)) return false;
  if (stored.size() > 1) return checksum_of(weight, by_place) == checksum;
  const bool is_half = weight.scalar_type() == at::kHalf;
  const double limit = is_half ? kLargestHalf : std::numeric_limits<double>::infinity();
  const at::Tensor wanted = first.clamp(-limit, limit).to(weight.scalar_type()).to(weight.device());
  const at::Tensor both_nan = wanted.isnan().logical_and(weight.isnan());
  return wanted.eq(weight).logical_or(both_nan).all().item<bool>();
}

}  // namespace amp_mp
