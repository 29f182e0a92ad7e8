// amp_C's optimizers: one step of a rule on lists of gradients, parameters and states.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "torch/apex/amp_c.h"

namespace amp_mp::apex {
namespace {

HyperTensors make_numbers(const TensorOrNumber& lr, double weight_decay, double beta1 = 0,
                          double beta2 = 0, double eps = 0) {
  HyperTensors numbers = {};
  if (const auto* tensor = std::get_if<at::Tensor>(&lr)) {
    numbers.lr = *tensor;
  } else {
    numbers.hyper.lr = std::get<double>(lr);
  }
  numbers.hyper.weight_decay = weight_decay;
  numbers.hyper.beta1 = beta1;
  numbers.hyper.beta2 = beta2;
  numbers.hyper.eps = eps;
  return numbers;
}

at::TensorOptions doubles(const TensorLists& lists) {
  return lists[1][0].options().dtype(at::kDouble);
}

// A Verdict that skips nothing and multiplies gradients by 1. Filled on the device, because a copy
// from the host would wait, and a CUDA graph cannot capture it.
at::Tensor make_verdict(const TensorLists& lists) {
  at::Tensor verdict = at::zeros({int64_t(sizeof(Verdict) / sizeof(double))}, doubles(lists));
  field(verdict, offsetof(Verdict, multiplier)).fill_(1);
  field(verdict, offsetof(Verdict, scale)).fill_(1);
  return verdict;
}

// The parameters' Clocks after so many steps, float64 [n, 4].
at::Tensor make_clocks(const TensorLists& lists, int64_t steps) {
  const at::Tensor clocks = at::zeros(
      {int64_t(lists[1].size()), int64_t(sizeof(Clock) / sizeof(double))}, doubles(lists));
  clocks.select(1, 0).fill_(double(steps));
  return clocks;
}

// op: the rule's operator. lists: gradients, parameters, the rule's states, and maybe others.
void apply_rule(const char* op, const TensorLists& lists, at::Tensor& verdict,
                const HyperTensors& numbers, const at::Tensor& clocks) {
  const RuleInfo& rule = *rule_named(op);
  std::vector<SlotTensors> own(lists[1].size());
  for (size_t i = 0; i < own.size(); ++i) {
    SlotTensors& each = own[i];
    // Another tensor of the same memory, whose gradient is not the .grad that the caller sees.
    each.param = lists[1][i].detach();
    each.param.mutable_grad() = lists[0][i];
    each.name = "tensor_lists[1][" + std::to_string(i) + "]";
    for (size_t k = 0; k < size_t(rule.states); ++k) {
      const at::Tensor& data = lists[k + 2][i];
      each.states.push_back({data, check_format(data, {"the state", int64_t(i), &each.name}), {}});
    }
    each.clock = clocks[int64_t(i)];
    each.tensor_index = int64_t(i);
  }
  Slots slots(std::move(own), verdict.device());
  const py::gil_scoped_release release;
  // Rules that need norms measure; for the others the verdict says everything.
  apply_(rule, slots, {numbers}, verdict, {.measures = rule.is_layerwise()});
}

constexpr const char* kAdam = R"(amp_mp.optim.Adam's step, in a mode other than 0 AdamW's.

tensor_lists: gradients, parameters, exp_avg, exp_avg_sq. step: from 1. lr: a number, or a tensor of
one float32 or float64. Gradients that are inf or NaN count as they are: noop_flag is not looked at.
)";
void multi_tensor_adam(int64_t, const at::Tensor&, const py::sequence& tensor_lists,
                       const TensorOrNumber& lr, double beta1, double beta2, double eps,
                       int64_t step, int64_t mode, bool bias_correction, double weight_decay) {
  const TensorLists lists = unpack_lists(tensor_lists, {4});
  if (lists[1].empty()) return;
  const at::NoGradGuard no_grad;
  HyperTensors numbers = make_numbers(lr, weight_decay, beta1, beta2, eps);
  numbers.hyper.bias_correction = bias_correction;
  const at::Tensor clocks = make_clocks(lists, step - 1);
  at::Tensor verdict = make_verdict(lists);
  if (mode != 0) {
    apply_rule("adamw_", lists, verdict, numbers, clocks);
  } else {
    apply_rule("adam_", lists, verdict, numbers, clocks);
  }
}

constexpr const char* kAdagrad = R"(amp_mp.optim.Adagrad's step.

tensor_lists: gradients, parameters, sum. mode: 0 for L2; in another the weight decay is decoupled.
)";
void multi_tensor_adagrad(int64_t, const at::Tensor&, const py::sequence& tensor_lists,
                          const TensorOrNumber& lr, double eps, int64_t mode, double weight_decay) {
  const TensorLists lists = unpack_lists(tensor_lists, {3});
  if (lists[1].empty()) return;
  const at::NoGradGuard no_grad;
  HyperTensors numbers = make_numbers(lr, weight_decay);
  numbers.hyper.eps = eps;
  numbers.hyper.decoupled = mode != 0;
  at::Tensor verdict = make_verdict(lists);
  apply_rule("adagrad_", lists, verdict, numbers, make_clocks(lists, 0));
}

constexpr const char* kLamb = R"(amp_mp.optim.LAMB's step; gradients are not written.

tensor_lists: gradients, parameters, exp_avg, exp_avg_sq. step: from 1. grad_averaging: 0 adds
gradients to the first moment times 1, not 1 - beta1. mode: 0 for L2, else the weight decay is
decoupled. Gradients are multiplied by min(1, max_grad_norm / global_grad_norm), a number or a
tensor of one element. use_nvlamb: adapt the rate also without weight decay.
)";
void multi_tensor_lamb(int64_t, const at::Tensor&, const py::sequence& tensor_lists,
                       const TensorOrNumber& lr, double beta1, double beta2, double eps,
                       int64_t step, bool bias_correction, double weight_decay,
                       int64_t grad_averaging, int64_t mode, const TensorOrNumber& global_grad_norm,
                       double max_grad_norm, bool use_nvlamb) {
  const TensorLists lists = unpack_lists(tensor_lists, {4});
  if (lists[1].empty()) return;
  const at::NoGradGuard no_grad;
  HyperTensors numbers = make_numbers(lr, weight_decay, beta1, beta2, eps);
  numbers.hyper.always_adapt = use_nvlamb;
  numbers.hyper.grad_averaging = grad_averaging != 0;
  numbers.hyper.adam_w_mode = mode != 0;
  numbers.hyper.bias_correction = bias_correction;
  at::Tensor verdict = make_verdict(lists);
  const at::Tensor multiplier = field(verdict, offsetof(Verdict, multiplier));
  if (const auto* norm = std::get_if<at::Tensor>(&global_grad_norm)) {
    multiplier.copy_(norm->to(at::kDouble).reciprocal().mul_(max_grad_norm).squeeze());
  } else {
    multiplier.fill_(max_grad_norm / std::get<double>(global_grad_norm));
  }
  multiplier.clamp_max_(1.0);
  apply_rule("lamb_", lists, verdict, numbers, make_clocks(lists, step - 1));
}

constexpr const char* kNovograd = R"(amp_mp.optim.NovoGrad's step.

tensor_lists: gradients, parameters, exp_avg. grad_norms: roots of the averages of squared norms,
float32 [n], updated. moment_mode: 0 for reg_inside_moment, else 1. norm_type: 2; ValueError for
another.
)";
void multi_tensor_novograd(int64_t, const at::Tensor&, const py::sequence& tensor_lists,
                           const at::Tensor& grad_norms, const TensorOrNumber& lr, double beta1,
                           double beta2, double eps, int64_t step, bool bias_correction,
                           double weight_decay, bool grad_averaging, int64_t moment_mode,
                           int64_t norm_type) {
  const TensorLists lists = unpack_lists(tensor_lists, {3});
  TORCH_CHECK_VALUE(norm_type == 2, "norm_type must be 2: the rule of amp_mp.optim has no other");
  if (lists[1].empty()) return;
  const at::NoGradGuard no_grad;
  HyperTensors numbers = make_numbers(lr, weight_decay, beta1, beta2, eps);
  numbers.hyper.dampening = grad_averaging ? beta1 : 0;
  numbers.hyper.bias_correction = bias_correction;
  numbers.hyper.reg_inside_moment = moment_mode == 0;
  const at::Tensor clocks = make_clocks(lists, step - 1);
  const at::Tensor squares = clocks.select(1, offsetof(Clock, own) / sizeof(double));
  // Above 0, or the rule's first step would take the gradient's norm as it is.
  squares.copy_(grad_norms.to(at::kDouble).square()).clamp_(0x1p-1074);
  at::Tensor verdict = make_verdict(lists);
  apply_rule("novograd_", lists, verdict, numbers, clocks);
  grad_norms.copy_(squares.sqrt());
}

constexpr const char* kSgd = R"(amp_mp.optim.SGD's step of the gradients times scale.

Nothing is written where noop_flag is not 0. tensor_lists: gradients, parameters, momentum_buffer,
and low-precision copies of the parameters or nothing. first_run: ignore what the buffers hold.
wd_after_momentum: whether the weight decay is decoupled.
)";
void multi_tensor_sgd(int64_t, const at::Tensor& noop_flag, const py::sequence& tensor_lists,
                      double weight_decay, double momentum, double dampening,
                      const TensorOrNumber& lr, bool nesterov, bool first_run,
                      bool wd_after_momentum, double scale) {
  const TensorLists lists = unpack_lists(tensor_lists, {3, 4});
  if (lists[1].empty()) return;
  const at::NoGradGuard no_grad;
  HyperTensors numbers = make_numbers(lr, weight_decay);
  numbers.hyper.momentum = momentum;
  numbers.hyper.dampening = dampening;
  numbers.hyper.nesterov = nesterov;
  numbers.hyper.decoupled = wd_after_momentum;
  at::Tensor verdict = make_verdict(lists);
  const at::Tensor skip = field(verdict, offsetof(Verdict, skip)),
                   multiplier = field(verdict, offsetof(Verdict, multiplier));
  skip.copy_(noop_flag.squeeze());
  multiplier.fill_(scale);
  if (first_run)
    for (const at::Tensor& buffer : lists[2]) buffer.masked_fill_(skip.eq(0), 0);
  const at::Tensor clocks = make_clocks(lists, first_run ? 0 : 1);
  if (momentum != 0) {
    apply_rule("sgd_", lists, verdict, numbers, clocks);
  } else {
    apply_rule("plain_sgd_", lists, verdict, numbers, clocks);
  }
  if (lists.size() < 4) return;
  multiplier.fill_(1);
  const py::gil_scoped_release release;
  copy_(lists[3], lists[1], verdict, 1.0, true);
}

}  // namespace

void bind_steps(py::module_& m) {
  using py::arg;
  const auto chunk = arg("chunk_size"), flag = arg("noop_flag"), lists = arg("tensor_lists"),
             lr = arg("lr"), beta1 = arg("beta1"), beta2 = arg("beta2"), eps = arg("eps"),
             step = arg("step"), mode = arg("mode"), corrects = arg("bias_correction"),
             decay = arg("weight_decay"), averages = arg("grad_averaging");
  m.def("multi_tensor_adam", &multi_tensor_adam, chunk, flag, lists, lr, beta1, beta2, eps, step,
        mode, corrects, decay, kAdam);
  m.def("multi_tensor_adagrad", &multi_tensor_adagrad, chunk, flag, lists, lr, eps, mode, decay,
        kAdagrad);
  m.def("multi_tensor_lamb", &multi_tensor_lamb, chunk, flag, lists, lr, beta1, beta2, eps, step,
        corrects, decay, averages, mode, arg("global_grad_norm"), arg("max_grad_norm"),
        arg("use_nvlamb"), kLamb);
  m.def("multi_tensor_novograd", &multi_tensor_novograd, chunk, flag, lists, arg("grad_norms"), lr,
        beta1, beta2, eps, step, corrects, decay, averages, arg("moment_mode"), arg("norm_type"),
        kNovograd);
  m.def("multi_tensor_sgd", &multi_tensor_sgd, chunk, flag, lists, decay, arg("momentum"),
        arg("dampening"), lr, arg("nesterov"), arg("first_run"), arg("wd_after_momentum"),
        arg("scale"), kSgd);
}

}  // namespace amp_mp::apex
