#include "torch/muon/orthogonalise.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace amp_mp::muon {
namespace {

// On a CPU a product of two large matrices fills the caches, and a stack of them would leave these.
constexpr int64_t kLargeOnCpu = 256;

at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  return a.dim() == 2 ? at::mm(a, b) : at::bmm(a, b);
}

// beta sum + alpha a b
at::Tensor add_product(const at::Tensor& sum, const at::Tensor& a, const at::Tensor& b, double beta,
                       double alpha = 1) {
  return a.dim() == 2 ? at::addmm(sum, a, b, beta, alpha) : at::baddbmm(sum, a, b, beta, alpha);
}

void orthogonalise_part(const at::Tensor& stack, const std::array<double, 3>& coefficients,
                        int64_t steps, double eps) {
  const auto [a, b, c] = coefficients;
  const at::Tensor own = stack.size(0) == 1 ? stack[0] : stack;
  const bool is_tall = own.size(-2) > own.size(-1);
  at::Tensor x = is_tall ? own.mT() : own;
  const at::Tensor norm = at::linalg_vector_norm(x, 2, at::IntArrayRef{-2, -1}, true);
  x.div_(norm.clamp_min(eps));  // no singular value is above 1
  for (int64_t step = 0; step < steps; ++step) {
    const at::Tensor gram = product(x, x.mT());
    const at::Tensor polynomial = add_product(gram, gram, gram, b, c);
    x = add_product(x, polynomial, x, a);
  }
  if (steps > 0) own.copy_(is_tall ? x.mT() : x);
}

}  // namespace

void orthogonalise_(const at::Tensor& stack, const std::array<double, 3>& coefficients,
                    int64_t steps, double eps, int64_t stack_bytes) {
  TORCH_CHECK_VALUE(stack.defined() && stack.dim() == 3 && stack.scalar_type() == at::kBFloat16,
                    "stack must be bfloat16 [n, rows, columns]");
  TORCH_CHECK_VALUE(steps >= 0 && steps < 100, "steps must be of [0, 100), found ", steps);
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const int64_t count = stack.size(0), rows = stack.size(1), columns = stack.size(2);
  int64_t most = std::max<int64_t>(1, stack_bytes / std::max<int64_t>(1, 2 * rows * columns));
  if (stack.is_cpu() && std::min(rows, columns) >= kLargeOnCpu) most = 1;
  for (int64_t begin = 0; begin < count; begin += most)
    orthogonalise_part(stack.narrow(0, begin, std::min(most, count - begin)), coefficients, steps,
                       eps);
}

WholeMatrices::WholeMatrices(const std::vector<at::Tensor>& locals,
                             const std::vector<py::dict>& groups,
                             const std::vector<std::optional<Shape>>& shapes) {
  TORCH_CHECK_VALUE(groups.size() == locals.size() && shapes.size() == locals.size(),
                    "locals, groups and shapes must be equally long");
  int64_t at = 0;
  for (size_t i = 0; i < locals.size(); ++i) {
    const at::Tensor& local = locals[i];
    TORCH_CHECK_VALUE(local.defined(), "locals[", i, "] is None; a tensor is needed");
    const int64_t begin = at;
    at += local.numel();
    if (!shapes[i] || begin == at) continue;
    Run* last = runs_.empty() || runs_.back().end != begin ? nullptr : &runs_.back();
    if (!local.is_contiguous())
      runs_.push_back(
          {begin, at, *shapes[i], groups[i], local.sizes().vec(), local.strides().vec()});
    else if (last && last->strides.empty() && last->group.is(groups[i]) &&
             last->matrix == *shapes[i])
      last->end = at;
    else
      runs_.push_back({begin, at, *shapes[i], groups[i], {}, {}});
  }
}

at::Tensor WholeMatrices::make_updates(const at::Tensor& directions) const {
  for (const Run& run : runs_) {
    at::Tensor own = directions.slice(0, run.begin, run.end);
    if (!run.strides.empty()) own = own.as_strided(run.sizes, run.strides);
    const at::Tensor stack = own.reshape({-1, run.matrix.first, run.matrix.second});
    const auto coefficients = py::cast<std::array<double, 3>>(run.group["ns_coefficients"]);
    const auto steps = py::cast<int64_t>(run.group["ns_steps"]);
    const auto eps = py::cast<double>(run.group["eps"]);
    {
      const py::gil_scoped_release release;
      orthogonalise_(stack, coefficients, steps, eps);
    }
    if (stack.const_data_ptr() != own.const_data_ptr()) own.copy_(stack.view(own.sizes()));
  }
  return directions;
}

void bind(py::module_& m) {
  m.def("orthogonalise_", &orthogonalise_, py::arg("stack"), py::arg("coefficients"),
        py::arg("steps"), py::arg("eps"), py::kw_only(), py::arg("stack_bytes") = kStackBytes,
        py::call_guard<py::gil_scoped_release>());
  py::class_<WholeMatrices>(m, "WholeMatrices")
      .def(py::init<const std::vector<at::Tensor>&, const std::vector<py::dict>&,
                    const std::vector<std::optional<WholeMatrices::Shape>>&>(),
           py::arg("locals"), py::arg("groups"), py::arg("shapes"))
      .def("__call__", &WholeMatrices::make_updates, py::arg("directions"));
}

}  // namespace amp_mp::muon
