// Apex's LARC, for wrappers/larc.py: each gradient times its layer's ratio, before any optimizer's
// step.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include "cpu/kernels.h"
#include "torch/bind.h"
#include "torch/python/unpack.h"

namespace amp_mp {
namespace {

at::Tensor on_device(const at::Device& device, const TensorOrNumber& number) {
  if (const auto* tensor = std::get_if<at::Tensor>(&number))
    return tensor->to(device, at::kDouble).squeeze();
  // Filled there: the host does not wait, as it would for a copy.
  return at::full({}, std::get<double>(number), at::TensorOptions(at::kDouble).device(device));
}

// One pass over tensors of float32 on the CPU.
void adapt_(const at::Tensor& grad, const at::Tensor& weight, float inverse, float decay,
            float ratio) {
  float* const g = grad.mutable_data_ptr<float>();
  const float* const w = weight.const_data_ptr<float>();
  at::parallel_for(0, grad.numel(), at::internal::GRAIN_SIZE, [&](int64_t begin, int64_t end) {
    cpu::kernels()->adapt(g + begin, w + begin, end - begin, inverse, decay, ratio);
  });
  bump_version(grad);
}

// What each tensor's gradient becomes: (grad * inverse + decay * weight) * ratio.
struct Adapting {
  at::Tensor inverse;         // of the scale, float32; undefined without a scale
  at::Tensor ratios, decays;  // of each tensor, float64 and float32
  bool decays_any = false;
};

// Of each tensor of the groups: grad_norms and weight_norms, float64 [n], are those of unscaled
// gradients and of weights.
Adapting adapting_of(const std::vector<py::dict>& groups, const at::Tensor& grad_norms,
                     const at::Tensor& weight_norms, double trust_coefficient, bool clip,
                     double eps) {
  const at::Device device = grad_norms.device();
  Adapting found;
  Tensors ratios, decays;
  int64_t first = 0;
  for (const py::dict& group : groups) {
    const auto count = int64_t(py::len(group["params"]));
    const at::Tensor grad = grad_norms.narrow(0, first, count),
                     weight = weight_norms.narrow(0, first, count);
    first += count;
    const auto number = group.contains("weight_decay")
                            ? py::cast<TensorOrNumber>(group["weight_decay"])
                            : TensorOrNumber(0.0);
    found.decays_any |= !std::holds_alternative<double>(number) || std::get<double>(number) != 0;
    const at::Tensor decay = on_device(device, number),
                     adapts = grad.gt(0).logical_and_(weight.gt(0));
    at::Tensor ratio = weight * trust_coefficient / (grad + decay * weight + eps);
    if (clip)
      ratio = (ratio / on_device(device, py::cast<TensorOrNumber>(group["lr"]))).clamp_max(1);
    ratios.push_back(at::where(adapts, ratio, 1.0));
    decays.push_back(adapts.to(at::kFloat) * decay);
  }
  if (first > 0) {
    found.ratios = at::cat(ratios);
    found.decays = at::cat(decays);
  }
  return found;
}

// The scale that gradients may keep: no element exceeds its tensor's norm, and the largest norm
// becomes 2^15 at most.
at::Tensor scale_to_keep(const Adapting& by, const at::Tensor& grad_norms,
                         const at::Tensor& weight_norms) {
  const int64_t count = by.ratios.numel();
  const at::Tensor largest =
      (by.ratios * (grad_norms.narrow(0, 0, count) + by.decays * weight_norms.narrow(0, 0, count)))
          .amax();
  return at::exp2((15 - largest.log2().ceil()).clamp(-24, 24)).to(at::kFloat);
}

// Number i of the gradients, in place.
void adapt_one(const at::Tensor& grad, const at::Tensor& weight, const Adapting& by, int64_t i) {
  const at::Device device = by.ratios.device();
  const auto fits = [&](const at::Tensor& t) {
    return t.is_cpu() && t.scalar_type() == at::kFloat && is_native_gradient(t, device);
  };
  if (by.decays_any && fits(grad) && fits(weight) && same_layout(grad, weight)) {
    const float inverse = by.inverse.defined() ? by.inverse.item<float>() : 1.0f;
    return adapt_(grad, weight, inverse, by.decays[i].item<float>(), by.ratios[i].item<float>());
  }
  const auto here = [&](const at::Tensor& number) { return number.to(grad.device()); };
  at::Tensor made = grad.to(at::kFloat);  // itself, if it is float32
  if (by.inverse.defined()) made.mul_(here(by.inverse));
  if (by.decays_any) {
    const at::Tensor decay = here(by.decays[i]);
    made.addcmul_(weight.to(at::kFloat).masked_fill(decay.eq(0), 0), decay);
  }
  made.mul_(here(by.ratios[i]));
  if (!made.is_same(grad)) grad.copy_(made);
}

// Changes gradients as LARC does, in place, without waiting for the device. roots is float64 [n,
// 4]; its columns 0 and 3 are the 2-norms of gradients and weights. The gradients carry `scale`.
// With `keeps` they carry another one afterwards, which is returned; else returns an undefined
// tensor.
at::Tensor larc_(const py::sequence& grads, const py::sequence& weights, const at::Tensor& roots,
                 const std::vector<py::dict>& groups, double trust_coefficient, bool clip,
                 double eps, const std::optional<TensorOrNumber>& scale, bool keeps) {
  const Tensors own = unpack(grads, "grads"), held = unpack(weights, "weights");
  TORCH_CHECK_VALUE(roots.dim() == 2 && roots.size(1) >= 4 && held.size() == own.size() &&
                        roots.size(0) >= int64_t(own.size()),
                    "grads, weights and the rows of roots must be as many");
  const at::NoGradGuard no_grad;
  at::Tensor inverse, grad_norms = roots.select(1, 0);
  const at::Tensor weight_norms = roots.select(1, 3);
  if (scale) {
    inverse = on_device(roots.device(), *scale).reciprocal().to(at::kFloat);
    grad_norms = grad_norms * inverse;
  }
  Adapting by = adapting_of(groups, grad_norms, weight_norms, trust_coefficient, clip, eps);
  if (!by.ratios.defined()) return {};
  by.inverse = inverse;
  at::Tensor kept;
  if (scale && keeps) {
    kept = scale_to_keep(by, grad_norms, weight_norms);
    by.ratios = by.ratios * kept;
  }
  by.ratios = by.ratios.to(at::kFloat);
  // From the last to the first: the cache still has what was measured last, and the step, which
  // reads the first ones first, then finds these in the cache.
  for (size_t i = own.size(); i-- > 0;)
    if (own[i].defined()) adapt_one(own[i], held[i], by, int64_t(i));
  return kept;
}

}  // namespace

void bind_larc(py::module_& m) {
  using py::arg;
  m.def("larc_", &larc_, arg("grads"), arg("weights"), arg("roots"), arg("groups"),
        arg("trust_coefficient"), arg("clip"), arg("eps"), arg("scale"), arg("keeps"));
}

}  // namespace amp_mp
