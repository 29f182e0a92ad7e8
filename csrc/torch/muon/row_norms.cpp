#include "torch/muon/row_norms.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <numeric>

#include "torch/python/objects.h"

namespace amp_mp::muon {
namespace {

constexpr double kEps = 1e-10;  // as the authors' code
// Doubles that stay in a processor's cache. torch may add a longer row in parts on several threads,
// and the bits would depend on how many rows a process has.
constexpr int64_t kCached = int64_t(1) << 15;

// The mean of each row's squares, in float64. A block of rows at a time is seven times as fast on a
// CPU as all doubles at once, and each row has the same bits.
at::Tensor mean_squares(const at::Tensor& rows) {
  const auto of = [](const at::Tensor& part) {
    return part.to(at::kDouble).square().mean(1, true);
  };
  const int64_t columns = rows.size(1);
  if (!rows.is_cpu() || rows.numel() <= kCached || 2 * columns > kCached) return of(rows);
  Tensors means;
  for (const at::Tensor& part : rows.split(kCached / columns)) means.push_back(of(part));
  return at::cat(means);
}

// All processes' rows, [rows, 2], from this process's rows.
at::Tensor of_all_processes(const at::Tensor& rows, const RowNorms::Member& member) {
  if (!is_dtensor(member.param)) return rows;
  const auto with_two = [](at::IntArrayRef sizes) {
    std::vector<int64_t> two = sizes.slice(0, sizes.size() - 1).vec();
    two.push_back(2);
    return two;
  };
  const at::Tensor own = rows.view(with_two(local_of(member.moment).sizes()));
  const at::IntArrayRef sizes = tensor_of(member.moment).sizes();
  return whole_of(like(own, member.param, with_two(sizes))).reshape({-1, 2});
}

// The rows of the blocks that keep their norms; equal blocks are matrices like any others.
std::vector<int64_t> blocks_of(const RowNorms::Member& member) {
  const py::object split = member.group["split"];
  if (py::isinstance<py::int_>(split)) return {member.rows};
  return py::cast<std::vector<int64_t>>(split);
}

void normalise_rows(at::Tensor rows, const RowNorms::Member& member, const at::Tensor& keeps) {
  const at::Tensor held = local_of(member.moment), moment = held.view({-1, 1});
  const auto beta2 = py::cast<double>(member.group["beta2"]);
  const at::Tensor square = mean_squares(rows);
  const at::Tensor moved = moment * beta2 + square.to(at::kFloat) * (1 - beta2);
  const at::Tensor next = at::where(keeps, moment, moved);
  // MKL's root of floats is up to an ulp off, and not the same on every processor.
  const at::Tensor root = next.to(at::kDouble).sqrt().to(at::kFloat);
  const at::Tensor scale = (root + kEps).reciprocal();
  const at::Tensor sums = at::cat({square, square * scale.to(at::kDouble).square()}, 1);
  const std::vector<int64_t> blocks = blocks_of(member);
  const int64_t height = std::accumulate(blocks.begin(), blocks.end(), int64_t(0));
  const at::Tensor matrices = of_all_processes(sums, member).view({-1, height, 2});
  Tensors ratios;
  for (const at::Tensor& block : matrices.split_with_sizes(blocks, 1)) {
    const at::Tensor all = block.sum(1), before = all.select(1, 0), after = all.select(1, 1);
    const at::Tensor found = at::where(after.gt(0), before / after, 1.0).sqrt().to(at::kFloat);
    ratios.push_back(found.unsqueeze(1).expand({-1, block.size(1)}));
  }
  at::Tensor ratio = at::cat(ratios, 1).reshape({-1, 1});
  if (is_dtensor(member.param)) {
    const at::Tensor whole = ratio.view(tensor_of(member.moment).sizes());
    ratio = package().part_of_whole(whole, member.param).reshape({-1, 1});
  }
  rows.mul_(scale * ratio);
  moment.copy_(next);
}

}  // namespace

std::vector<int64_t> row_sizes(at::IntArrayRef sizes, bool flattened) {
  std::vector<int64_t> found = sizes.vec();
  for (size_t d = flattened || sizes.size() > 3 ? 1 : sizes.size() - 1; d < sizes.size(); ++d)
    found[d] = 1;
  return found;
}

void RowNorms::normalise(const at::Tensor& updates, const at::Tensor& verdict,
                         const std::vector<bool>& has_gradient) const {
  const py::gil_scoped_acquire acquire;
  const at::NoGradGuard no_grad;
  const at::Tensor skips = verdict.select(0, 0).ne(0), always = at::ones_like(skips);
  for (size_t i = 0; i < members_.size(); ++i) {
    const Member& member = members_[i];
    const at::Tensor& local = member.local;
    if (tensor_of(member.param).numel() == 0) continue;  // on all processes
    if (!has_gradient[i] && !is_dtensor(member.param)) continue;
    at::Tensor own = updates.slice(0, member.begin, member.begin + local.numel());
    if (!local.is_contiguous()) own = own.as_strided(local.sizes(), local.strides());
    const int64_t count = local_of(member.moment).numel();
    const at::Tensor rows = own.reshape({count, count > 0 ? local.numel() / count : 0});
    normalise_rows(rows, member, has_gradient[i] ? skips : always);
    if (rows.const_data_ptr() != own.const_data_ptr()) own.copy_(rows.view(own.sizes()));
  }
}

}  // namespace amp_mp::muon
