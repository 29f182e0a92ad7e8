#include "torch/muon/orthogonalise.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cmath>
#include <optional>
#include <tuple>

#include "torch/bind.h"
#include "torch/muon/newton_schulz.h"

namespace amp_mp::muon {

std::vector<int64_t> direction_offsets(const std::vector<at::Tensor>& params) {
  constexpr int64_t kAligned = 16 / 2;  // elements
  std::vector<int64_t> found = {0};
  for (const at::Tensor& param : params)
    found.push_back(found.back() + (param.numel() + kAligned - 1) / kAligned * kAligned);
  return found;
}

namespace {

// Working on a stack takes three to four times its own bytes, so large ones are cut.
constexpr int64_t kStackBytes = int64_t(1) << 28;
// On a CPU a product of two large matrices fills the caches, and a stack of them would leave these.
constexpr int64_t kLargeOnCpu = 256;
// Each iteration multiplies a Gram matrix's rounding errors by a^2 at most. Before they have grown
// by more than this it is made again of the matrix: float32's become 2^-12, of which the rounding
// of updates to bfloat16 leaves nothing; with float16's, updates are as far from float64's as
// without a Gram matrix. Without this limit ten iterations diverge.
constexpr double kMostGrowth = 0x1p12, kMostGrowthOfHalf = 0x1p8;

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  return a.dim() == 2 ? at::mm(a, b) : at::bmm(a, b);
}

// beta sum + alpha a b
at::Tensor add_product(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b, double beta,
                       double alpha = 1) {
  return a.dim() == 2 ? at::addmm(sum, a, b, beta, alpha) : at::baddbmm(sum, a, b, beta, alpha);
}

at::Tensor norm_of(const at::Tensor& x, double order) {
  return at::linalg_vector_norm(x, order, at::IntArrayRef{-2, -1}, true);
}

// Divides each matrix by the power of two below its largest |element|. That is exact, so the bits
// of what follows are those without it wherever no square vanishes or overflows.
void scale_elements_(const at::Tensor& x) {
  constexpr int kExponent = 0x7F80, kLeastNormal = 0x0080;  // bits of a bfloat16
  const at::Tensor largest = norm_of(x, INFINITY);
  const at::Tensor power = largest.view(at::kShort).bitwise_and_(kExponent);
  x.div_(power.clamp_min_(kLeastNormal).view(at::kBFloat16));
}

// x divided by its norm, in the dtype of the products: no singular value is above 1.
at::Tensor normalised(const at::Tensor& x, const NewtonSchulz& how) {
  constexpr double kLeastNorm = 0x1p-126;  // of zeros
  const bool any_size = how.eps == 0;
  if (any_size) scale_elements_(x);
  const double least = any_size ? kLeastNorm : how.eps;
  if (how.dtype == at::kBFloat16) return x.div_(norm_of(x, 2).clamp_min(least));
  const at::Tensor wide = x.to(at::kFloat);
  return (wide / norm_of(wide, 2).clamp_min(least)).to(how.dtype);
}

// Polynomials of X X^T commute. So iterations go on with the small Gram matrix G and their product
// P alone, G <- p G p and P <- P p, and multiply the long matrix once for all of them: X <- P X
// (Zhang et al., "Gram Newton-Schulz", 2026). most_growth: of G's errors; 0 multiplies X each time.
void orthogonalise_part(const at::Tensor& stack, const NewtonSchulz& how, double factor,
                        double most_growth) {
  const at::Tensor own = stack.size(0) == 1 ? stack[0] : stack;
  const bool is_tall = own.size(-2) > own.size(-1);
  at::Tensor x = normalised(is_tall ? own.mT() : own, how), gram, together;
  double growth = 1;
  for (size_t step = 0; step < how.iterations.size(); ++step) {
    const bool is_last = step + 1 == how.iterations.size();
    const double scale = is_last ? factor : 1;
    const auto [a, b, c] = how.iterations[step];
    if (!gram.defined()) gram = product(x, x.mT());
    const at::Tensor polynomial = add_product(gram, gram, gram, scale * b, scale * c);
    growth = std::max(1.0, growth * a * a);
    const double next = is_last ? INFINITY : how.iterations[step + 1][0];
    const bool ends = growth * next * next >= most_growth;
    if (ends && !together.defined()) {
      x = add_product(x, polynomial, x, scale * a);
    } else {
      polynomial.diagonal(0, -2, -1).add_(scale * a);
      together = together.defined() ? product(together, polynomial) : polynomial;
      if (ends)
        x = product(together, x);
      else
        gram = product(product(polynomial, gram), polynomial);
    }
    if (!ends) continue;
    gram = together = at::Tensor();
    growth = 1;
  }
  if (how.iterations.empty() && factor != 1) x.mul_(factor);
  if (!how.iterations.empty() || how.dtype != at::kBFloat16) own.copy_(is_tall ? x.mT() : x);
}

// Newton-Schulz, in place: singular values become about `factor`. stack: bfloat16
// [n, rows, columns]. Queues products on the device and waits for nothing. On a CPU the bits do not
// depend on what else is in the stack.
void orthogonalise_(const at::Tensor& stack, const NewtonSchulz& given, double factor = 1,
                    int64_t stack_bytes = kStackBytes) {
  TORCH_CHECK_VALUE(stack.defined() && stack.dim() == 3 && stack.scalar_type() == at::kBFloat16,
                    "stack must be bfloat16 [n, rows, columns]");
  if (stack.numel() == 0) return;
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const int64_t count = stack.size(0), rows = stack.size(1), columns = stack.size(2);
  NewtonSchulz how = given;
  const bool on_gram = std::max(rows, columns) >= given.gram_from * std::min(rows, columns);
  // bfloat16 would lose the small singular values of a Gram matrix.
  if (on_gram && given.dtype != at::kFloat) how.dtype = stack.is_cpu() ? at::kFloat : at::kHalf;
  const double growth = how.dtype == at::kFloat ? kMostGrowth : kMostGrowthOfHalf;
  const double most_growth = on_gram ? growth : 0;
  const int64_t bytes = int64_t(c10::elementSize(how.dtype)) * rows * columns;
  int64_t most = std::max<int64_t>(1, stack_bytes / bytes);
  const bool is_large = std::min(rows, columns) >= kLargeOnCpu;
  if (stack.is_cpu() && (is_large || how.dtype != at::kBFloat16)) most = 1;
  for (int64_t begin = 0; begin < count; begin += most)
    orthogonalise_part(stack.narrow(0, begin, std::min(most, count - begin)), how, factor,
                       most_growth);
}

// What a matrix consists of from its first row to its last: so many matrices of so many rows and
// columns, whose singular values become about so much.
using Blocks = std::vector<std::tuple<int64_t, int64_t, int64_t, double>>;

// Makes each of the matrices' blocks orthogonal, in place.
void make_blocks(const at::Tensor& own, const Blocks& blocks, const NewtonSchulz& how) {
  int64_t rows = 0, at = 0;
  for (const auto& [count, own_rows, columns, factor] : blocks) rows += count * own_rows;
  const at::Tensor whole = own.reshape({-1, rows, std::get<2>(blocks.at(0))});
  for (const auto& [count, own_rows, columns, factor] : blocks) {
    const at::Tensor part = whole.narrow(1, at, count * own_rows);
    const at::Tensor stack = part.reshape({-1, own_rows, columns});
    orthogonalise_(stack, how, factor);
    if (stack.const_data_ptr() != part.const_data_ptr()) part.copy_(stack.view(part.sizes()));
    at += count * own_rows;
  }
  if (whole.const_data_ptr() != own.const_data_ptr()) own.copy_(whole.view(own.sizes()));
}

// The directions of parameters of which this process has all, and how their updates are made. It
// runs no Python between the first matrix and the last: an interrupt finds none of them made
// orthogonal, or all.
class WholeMatrices {
 public:
  // One each for the parameters, in the order of the directions: their memory here, param_groups,
  // and blocks; none for a parameter that is not for this object.
  WholeMatrices(const std::vector<at::Tensor>& locals, const std::vector<py::dict>& groups,
                const std::vector<std::optional<Blocks>>& blocks) {
    TORCH_CHECK_VALUE(groups.size() == locals.size() && blocks.size() == locals.size(),
                      "locals, groups and blocks must be equally long");
    offsets_ = direction_offsets(locals);
    for (size_t i = 0; i < locals.size(); ++i) {
      const at::Tensor& local = locals[i];
      TORCH_CHECK_VALUE(local.defined(), "locals[", i, "] is None; a tensor is needed");
      const int64_t begin = offsets_[i], end = offsets_[i + 1];
      if (!blocks[i] || begin == end) continue;
      Run* last = runs_.empty() || runs_.back().end != begin ? nullptr : &runs_.back();
      const bool is_alone = !local.is_contiguous();
      if (is_alone)
        runs_.push_back(
            {begin, end, *blocks[i], groups[i], local.sizes().vec(), local.strides().vec(), true});
      else if (last && !last->is_alone && last->group.is(groups[i]) && last->blocks == *blocks[i] &&
               last->sizes[1] == local.numel()) {
        last->end = end;
        ++last->sizes[0];
      } else {
        runs_.push_back(
            {begin, end, *blocks[i], groups[i], {1, local.numel()}, {end - begin, 1}, false});
      }
    }
  }

  const std::vector<int64_t>& offsets() const { return offsets_; }
  // The same tensor, with updates in place of the directions.
  at::Tensor make_updates(const at::Tensor& directions) const {
    for (const Run& run : runs_) {
      const at::Tensor own =
          directions.slice(0, run.begin, run.end).as_strided(run.sizes, run.strides);
      const NewtonSchulz how = newton_schulz_of(run.group);
      const py::gil_scoped_release release;
      make_blocks(own, run.blocks, how);
    }
    return directions;
  }

 private:
  // Parameters of the same blocks and numbers that lie one behind the other: sizes and strides of
  // all of them, or of the one whose memory is not in the order of its rows.
  struct Run {
    int64_t begin, end;
    Blocks blocks;
    py::dict group;
    std::vector<int64_t> sizes, strides;
    bool is_alone;
  };
  std::vector<int64_t> offsets_;
  std::vector<Run> runs_;
};

}  // namespace

void bind(py::module_& m) {
  m.def(
      "orthogonalise_",
      [](const at::Tensor& stack, const py::dict& group, double factor, int64_t stack_bytes) {
        const NewtonSchulz how = newton_schulz_of(group);
        const py::gil_scoped_release release;
        orthogonalise_(stack, how, factor, stack_bytes);
      },
      py::arg("stack"), py::arg("group"), py::arg("factor") = 1.0, py::kw_only(),
      py::arg("stack_bytes") = kStackBytes);
  m.def(
      "ns_iterations", [](const py::dict& group) { return newton_schulz_of(group).iterations; },
      py::arg("group"));
  py::class_<WholeMatrices>(m, "WholeMatrices")
      .def(py::init<const std::vector<at::Tensor>&, const std::vector<py::dict>&,
                    const std::vector<std::optional<Blocks>>&>(),
           py::arg("locals"), py::arg("groups"), py::arg("blocks"))
      .def_property_readonly("offsets", &WholeMatrices::offsets)
      .def("__call__", &WholeMatrices::make_updates, py::arg("directions"));
}

}  // namespace amp_mp::muon
