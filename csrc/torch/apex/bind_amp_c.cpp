// amp_C as Python sees it, _C.amp_C: names and order of the arguments are Apex's.
#include "torch/apex/amp_c.h"

namespace amp_mp::apex {
namespace {

constexpr const char* kModule = R"(Apex's functions over lists of tensors, by the native passes.

chunk_size has no effect. noop_flag, int32 [1], becomes 1 where an input is inf or NaN, and is never
cleared; the host does not wait for it. tensor_lists: lists of float32, float16 or bfloat16 tensors,
also mixed in a list, dense in any layout, and all on one device; results that share memory
otherwise than as a whole are a ValueError. Computed in float32 and rounded once; empty lists and
tensors are skipped. ValueError where lists differ in length or shapes, before anything is written.
)";

constexpr const char* kScale = "out = in * scale; tensor_lists: in, out, which may be the same.";

constexpr const char* kAxpby = R"(out = a x + b y; tensor_lists: x, y, out.

arg_to_check: whether noop_flag looks at x alone (0), y alone (1) or both (-1, the default).
ValueError for another.
)";

constexpr const char* kNorm = R"(The 2-norm of all tensors, and with per_tensor of each.

Returns float32 [1] and [n], without per_tensor, the default, [0]. Summed in double where float32
would overflow: finite elements have a finite norm below 2^128; inf where an element is inf or NaN.
)";

constexpr const char* kUnscaleNorm =
    "multi_tensor_l2norm of the tensors times |inv_scale|, a tensor of one element.";

constexpr const char* kAdam = R"(amp_mp.optim.Adam's step, in a mode other than 0 AdamW's.

tensor_lists: gradients, parameters, exp_avg, exp_avg_sq. step: from 1. lr: a number, or a tensor of
one float32 or float64. Gradients that are inf or NaN count as they are: noop_flag is not looked at.
)";

constexpr const char* kAdagrad = R"(amp_mp.optim.Adagrad's step.

tensor_lists: gradients, parameters, sum. mode: 0 for L2; in another the weight decay is decoupled.
)";

constexpr const char* kLamb = R"(amp_mp.optim.LAMB's step; gradients are not written.

tensor_lists: gradients, parameters, exp_avg, exp_avg_sq. step: from 1. grad_averaging: 0 adds
gradients to the first moment times 1, not 1 - beta1. mode: 0 for L2, else the weight decay is
decoupled. Gradients are multiplied by min(1, max_grad_norm / global_grad_norm), a number or a
tensor of one element. use_nvlamb: adapt the rate also without weight decay.
)";

constexpr const char* kNovograd = R"(amp_mp.optim.NovoGrad's step.

tensor_lists: gradients, parameters, exp_avg. grad_norms: roots of the averages of squared norms,
float32 [n], updated. moment_mode: 0 for reg_inside_moment, else 1. norm_type: 2; ValueError for
another.
)";

constexpr const char* kSgd = R"(amp_mp.optim.SGD's step of the gradients times scale.

Nothing is written where noop_flag is not 0. tensor_lists: gradients, parameters, momentum_buffer,
and low-precision copies of the parameters or nothing. first_run: ignore what the buffers hold.
wd_after_momentum: whether the weight decay is decoupled.
)";

constexpr const char* kHysteresis =
    R"(amp_mp.scaling.Hysteresis on tensors of one element, in place.

current_scale, found_inf: float32, an overflow where found_inf > 0; growth_tracker,
hysteresis_tracker: int32. Returns current_scale, which stays in [2^-126, 2^126].
)";

constexpr const char* kClip = R"(torch's clip_grad_norm_ for the 2-norm, in place.

Returns the norm, float32 of no dimension; or None, with nothing done, where there are no gradients
or only torch's function takes them: sparse, DTensors, float64, on several devices, with gaps.
error_if_nonfinite: RuntimeError for an inf or NaN, for which the host waits.
)";

}  // namespace

void bind_amp_c(py::module_& m) {
  using py::arg;
  m.def("larc_", &larc_, arg("grads"), arg("weights"), arg("roots"), arg("groups"),
        arg("trust_coefficient"), arg("clip"), arg("eps"), arg("scale"), arg("keeps"));
  m.def("clip_grad_norm_", &clip_grad_norm_, arg("parameters"), arg("max_norm"),
        arg("error_if_nonfinite"), kClip);

  py::module_ a = m.def_submodule("amp_C", kModule);
  const auto chunk = arg("chunk_size"), flag = arg("noop_flag"), lists = arg("tensor_lists"),
             lr = arg("lr"), beta1 = arg("beta1"), beta2 = arg("beta2"), eps = arg("eps"),
             step = arg("step"), mode = arg("mode"), corrects = arg("bias_correction"),
             decay = arg("weight_decay"), averages = arg("grad_averaging");
  a.def("multi_tensor_scale", &multi_tensor_scale, chunk, flag, lists, arg("scale"), kScale);
  a.def("multi_tensor_axpby", &multi_tensor_axpby, chunk, flag, lists, arg("a"), arg("b"),
        arg("arg_to_check") = -1, kAxpby);
  a.def("multi_tensor_l2norm", &multi_tensor_l2norm, chunk, flag, lists, arg("per_tensor") = false,
        kNorm);
  a.def("multi_tensor_unscale_l2norm", &multi_tensor_unscale_l2norm, chunk, flag, lists,
        arg("inv_scale"), arg("per_tensor") = false, kUnscaleNorm);
  a.def("multi_tensor_adam", &multi_tensor_adam, chunk, flag, lists, lr, beta1, beta2, eps, step,
        mode, corrects, decay, kAdam);
  a.def("multi_tensor_adagrad", &multi_tensor_adagrad, chunk, flag, lists, lr, eps, mode, decay,
        kAdagrad);
  a.def("multi_tensor_lamb", &multi_tensor_lamb, chunk, flag, lists, lr, beta1, beta2, eps, step,
        corrects, decay, averages, mode, arg("global_grad_norm"), arg("max_grad_norm"),
        arg("use_nvlamb"), kLamb);
  a.def("multi_tensor_novograd", &multi_tensor_novograd, chunk, flag, lists, arg("grad_norms"), lr,
        beta1, beta2, eps, step, corrects, decay, averages, arg("moment_mode"), arg("norm_type"),
        kNovograd);
  a.def("multi_tensor_sgd", &multi_tensor_sgd, chunk, flag, lists, decay, arg("momentum"),
        arg("dampening"), lr, arg("nesterov"), arg("first_run"), arg("wd_after_momentum"),
        arg("scale"), kSgd);
  a.def("update_scale_hysteresis", &update_scale_hysteresis, arg("current_scale"),
        arg("growth_tracker"), arg("hysteresis_tracker"), arg("found_inf"), arg("growth_factor"),
        arg("backoff_factor"), arg("growth_interval"), arg("hysteresis"), kHysteresis);
  py::list names;
  for (const auto& [name, function] : py::dict(a.attr("__dict__")))
    if (py::isinstance<py::function>(function)) names.append(name);
  a.attr("__all__") = names;
}

}  // namespace amp_mp::apex
