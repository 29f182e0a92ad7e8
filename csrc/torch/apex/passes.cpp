// amp_C as Python sees it, _C.amp_C: names and order of the arguments are Apex's. Here are the
// functions without a rule, and the clipping of apex.contrib; steps.cpp has the others.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "torch/apex/amp_c.h"
#include "torch/ops.h"
#include "torch/python/objects.h"

namespace amp_mp::apex {

TensorLists unpack_lists(const py::sequence& tensor_lists, std::initializer_list<size_t> counts) {
  std::string wanted;
  for (const size_t count : counts)
    wanted += (wanted.empty() ? "" : " or ") + std::to_string(count);
  TORCH_CHECK_VALUE(std::find(counts.begin(), counts.end(), tensor_lists.size()) != counts.end(),
                    "tensor_lists must be ", wanted, " lists, found ", tensor_lists.size());
  TensorLists lists;
  for (const py::handle& list : tensor_lists) {
    TORCH_CHECK_TYPE(py::isinstance<py::sequence>(list), "tensor_lists[", lists.size(),
                     "] must be a list of tensors, found ", repr_of(list));
    lists.push_back(unpack(py::reinterpret_borrow<py::sequence>(list), "tensor_lists"));
  }
  const Tensors& firsts = lists[0];
  for (size_t i = 0; i < lists.size(); ++i) {
    TORCH_CHECK_VALUE(lists[i].size() == firsts.size(), "tensor_lists[", i, "] has ",
                      lists[i].size(), " tensors, but tensor_lists[0] ", firsts.size());
    for (size_t j = 0; j < firsts.size(); ++j) {
      const at::Tensor& t = lists[i][j];
      TORCH_CHECK_TYPE(t.defined(), "tensor_lists[", i, "][", j, "] is None; a tensor is needed");
      TORCH_CHECK_VALUE(t.sizes() == firsts[j].sizes(), "tensor_lists[", i, "][", j, "] has shape ",
                        shape_text(t.sizes()), ", but tensor_lists[0][", j, "] ",
                        shape_text(firsts[j].sizes()));
    }
  }
  return lists;
}

namespace {

// The tensors' Statistics on the flag's device; the flag becomes 1 if an element is inf or NaN.
at::Tensor measure_and_flag(const at::Tensor& noop_flag, const Tensors& tensors) {
  const at::Tensor rows = measure(tensors).to(noop_flag.device());
  noop_flag.masked_fill_(rows.select(0, -1).select(0, 2).gt(0), 1);
  return rows;
}

// float64 [n + 1]: the 2-norms of the tensors and of all; inf with an element that is inf or NaN.
at::Tensor norms_of(const at::Tensor& rows) {
  return rows.select(1, 0).sqrt().masked_fill_(rows.select(1, 2).gt(0), HUGE_VAL);
}

Tensors as_float(const Tensors& tensors) {
  Tensors converted;
  for (const at::Tensor& t : tensors) converted.push_back(t.to(at::kFloat));
  return converted;
}

constexpr const char* kScale = "out = in * scale; tensor_lists: in, out, which may be the same.";
void multi_tensor_scale(int64_t, const at::Tensor& noop_flag, const py::sequence& tensor_lists,
                        double scale) {
  const TensorLists lists = unpack_lists(tensor_lists, {2});
  const py::gil_scoped_release release;
  const at::NoGradGuard no_grad;
  measure_and_flag(noop_flag, lists[0]);
  copy_(lists[1], lists[0], std::nullopt, scale, false);
}

constexpr const char* kAxpby = R"(out = a x + b y; tensor_lists: x, y, out.

arg_to_check: whether noop_flag looks at x alone (0), y alone (1) or both (-1, the default).
ValueError for another.
)";
void multi_tensor_axpby(int64_t, const at::Tensor& noop_flag, const py::sequence& tensor_lists,
                        double a, double b, int64_t arg_to_check) {
  const TensorLists lists = unpack_lists(tensor_lists, {3});
  TORCH_CHECK_VALUE(arg_to_check >= -1 && arg_to_check <= 1,
                    "arg_to_check must be -1, 0 or 1, found ", arg_to_check);
  const py::gil_scoped_release release;
  const at::NoGradGuard no_grad;
  Tensors checked = lists[arg_to_check == 1 ? 1 : 0];
  if (arg_to_check == -1) checked.insert(checked.end(), lists[1].begin(), lists[1].end());
  measure_and_flag(noop_flag, checked);
  if (lists[0].empty()) return;
  const Tensors sums = at::_foreach_mul(as_float(lists[0]), a);
  at::_foreach_add_(sums, as_float(lists[1]), b);
  copy_(lists[2], sums, std::nullopt, 1.0, false);
}

using Norms = std::pair<at::Tensor, at::Tensor>;

Norms norms_in(const py::sequence& tensor_lists, const at::Tensor& noop_flag, bool per_tensor,
               const std::optional<at::Tensor>& inv_scale) {
  const TensorLists lists = unpack_lists(tensor_lists, {1});
  const py::gil_scoped_release release;
  const at::NoGradGuard no_grad;
  at::Tensor norms = norms_of(measure_and_flag(noop_flag, lists[0]));
  if (inv_scale) norms = norms.mul(inv_scale->abs());
  const at::Tensor rounded = norms.to(at::kFloat);
  const int64_t count = rounded.size(0) - 1;
  return {rounded.narrow(0, count, 1).clone(), rounded.narrow(0, 0, per_tensor ? count : 0)};
}

constexpr const char* kNorm = R"(The 2-norm of all tensors, and with per_tensor of each.

Returns float32 [1] and [n], without per_tensor, the default, [0]. Summed in double where float32
would overflow: finite elements have a finite norm below 2^128; inf where an element is inf or NaN.
)";
Norms multi_tensor_l2norm(int64_t, const at::Tensor& noop_flag, const py::sequence& tensor_lists,
                          bool per_tensor) {
  return norms_in(tensor_lists, noop_flag, per_tensor, std::nullopt);
}

constexpr const char* kUnscaleNorm =
    "multi_tensor_l2norm of the tensors times |inv_scale|, a tensor of one element.";
Norms multi_tensor_unscale_l2norm(int64_t, const at::Tensor& noop_flag,
                                  const py::sequence& tensor_lists, const at::Tensor& inv_scale,
                                  bool per_tensor) {
  return norms_in(tensor_lists, noop_flag, per_tensor, inv_scale);
}

constexpr const char* kHysteresis =
    R"(amp_mp.scaling.Hysteresis on tensors of one element, in place.

current_scale, found_inf: float32, an overflow where found_inf > 0; growth_tracker,
hysteresis_tracker: int32. Returns current_scale. As Apex's it has no bounds: a scale that would be
infinite stays as it is, one below 2^-126 becomes 0.
)";
at::Tensor update_scale_hysteresis(const at::Tensor& current_scale,
                                   const at::Tensor& growth_tracker,
                                   const at::Tensor& hysteresis_tracker,
                                   const at::Tensor& found_inf, double growth_factor,
                                   double backoff_factor, int64_t growth_interval,
                                   int64_t hysteresis) {
  const at::NoGradGuard no_grad;
  const at::Device device = current_scale.device();
  const int64_t size = sizeof(HysteresisScale) / sizeof(double);
  const at::Tensor state = at::zeros({size}, at::TensorOptions().dtype(at::kDouble).device(device));
  // Filled on the device: for a copy from the host, the host would have to wait.
  const auto set = [&](size_t offset, double value) { field(state, offset).fill_(value); };
  set(offsetof(HysteresisScale, kind), double(ScaleKind::hysteresis));
  set(offsetof(HysteresisScale, scale_max), std::numeric_limits<double>::infinity());
  set(offsetof(HysteresisScale, growth_factor), growth_factor);
  set(offsetof(HysteresisScale, backoff_factor), backoff_factor);
  set(offsetof(HysteresisScale, growth_interval), double(growth_interval));
  set(offsetof(HysteresisScale, hysteresis), double(hysteresis));
  const at::Tensor scale = field(state, offsetof(HysteresisScale, scale));
  const std::pair<const at::Tensor&, at::Tensor> numbers[] = {
      {current_scale, scale},
      {growth_tracker, field(state, offsetof(HysteresisScale, growth_tracker))},
      {hysteresis_tracker, field(state, offsetof(HysteresisScale, hysteresis_tracker))}};
  for (const auto& [given, place] : numbers) place.copy_(given.squeeze());
  ScaleUpdateTensors update = {};
  update.policy = state;
  update_scale_(update, found_inf.gt(0).to(device, at::kDouble).squeeze(), std::nullopt, nullptr);
  const at::Tensor rounded = scale.to(at::kFloat);
  scale.copy_(at::where(rounded.isinf(), current_scale.squeeze(), rounded));
  scale.masked_fill_(scale.lt(std::numeric_limits<float>::min()), 0);
  for (const auto& [given, place] : numbers) given.copy_(place);
  return current_scale;
}

constexpr const char* kClip = R"(torch's clip_grad_norm_ for the 2-norm, in place.

Returns the norm, float32 of no dimension; or None, with nothing done, where there are no gradients
or only torch's function takes them: sparse, DTensors, float64, on several devices, with gaps.
error_if_nonfinite: RuntimeError for an inf or NaN, for which the host waits.
)";
at::Tensor clip_grad_norm_(const py::sequence& parameters, double max_norm,
                           bool error_if_nonfinite) {
  const Tensors params = unpack(parameters, "parameters");
  const py::gil_scoped_release release;
  const at::NoGradGuard no_grad;
  Tensors grads;
  for (const at::Tensor& param : params) {
    if (!param.defined()) return {};
    const at::Tensor& grad = param.grad();
    if (!grad.defined()) continue;
    if (!is_native_gradient(grad, (grads.empty() ? grad : grads[0]).device())) return {};
    grads.push_back(grad);
  }
  if (grads.empty()) return {};
  const at::Tensor norm = norms_of(measure(grads)).select(0, -1);
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(norm.item<double>()),
              "The total norm of order 2.0 for gradients is non-finite");
  const at::Tensor factor = norm.add(1e-6).reciprocal_().mul_(max_norm).clamp_max_(1.0);
  // A Verdict: do not skip, multiply by the factor.
  const at::Tensor verdict = at::stack({at::zeros_like(factor), factor, norm, norm, factor});
  copy_(grads, grads, verdict, 1.0, false);
  return norm.to(at::kFloat);
}

constexpr const char* kModule = R"(Apex's functions over lists of tensors, by the native passes.

chunk_size has no effect. noop_flag, int32 [1], becomes 1 where an input is inf or NaN, and is never
cleared; the host does not wait for it. tensor_lists: lists of float32, float16 or bfloat16 tensors,
also mixed in a list, dense in any layout, and all on one device; results that share memory
otherwise than as a whole are a ValueError. Computed in float32 and rounded once; empty lists and
tensors are skipped. ValueError where lists differ in length or shapes, before anything is written.
)";

}  // namespace

void bind_amp_c(py::module_& m) {
  using py::arg;
  m.def("clip_grad_norm_", &clip_grad_norm_, arg("parameters"), arg("max_norm"),
        arg("error_if_nonfinite"), kClip);
  py::module_ a = m.def_submodule("amp_C", kModule);
  const auto chunk = arg("chunk_size"), flag = arg("noop_flag"), lists = arg("tensor_lists");
  a.def("multi_tensor_scale", &multi_tensor_scale, chunk, flag, lists, arg("scale"), kScale);
  a.def("multi_tensor_axpby", &multi_tensor_axpby, chunk, flag, lists, arg("a"), arg("b"),
        arg("arg_to_check") = -1, kAxpby);
  a.def("multi_tensor_l2norm", &multi_tensor_l2norm, chunk, flag, lists, arg("per_tensor") = false,
        kNorm);
  a.def("multi_tensor_unscale_l2norm", &multi_tensor_unscale_l2norm, chunk, flag, lists,
        arg("inv_scale"), arg("per_tensor") = false, kUnscaleNorm);
  a.def("update_scale_hysteresis", &update_scale_hysteresis, arg("current_scale"),
        arg("growth_tracker"), arg("hysteresis_tracker"), arg("found_inf"), arg("growth_factor"),
        arg("backoff_factor"), arg("growth_interval"), arg("hysteresis"), kHysteresis);
  bind_steps(a);
  py::list names;
  for (const auto& [name, function] : py::dict(a.attr("__dict__")))
    if (py::isinstance<py::function>(function)) names.append(name);
  a.attr("__all__") = names;
}

}  // namespace amp_mp::apex
