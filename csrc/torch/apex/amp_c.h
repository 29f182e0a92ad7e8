#pragma once
// Apex's amp_C by the passes and rules of amp_mp. bind_amp_c.cpp says what each function does.
// Everything that takes a Python object needs the GIL, and waits for the passes without it.
#include <initializer_list>
#include <utility>
#include <variant>

#include "torch/python/unpack.h"

namespace amp_mp::apex {

using TensorLists = std::vector<Tensors>;
using Number = std::variant<at::Tensor, double>;  // a tensor of one element, or one of the host's

// ValueError unless there are as many lists as one of `counts` says, all with as many tensors of
// equal shapes; TypeError where one holds something else.
TensorLists unpack_lists(const py::sequence& tensor_lists, std::initializer_list<size_t> counts);

// Whether the passes can read and write the gradient in place.
bool is_native(const at::Tensor& grad, const at::Device& device);

void multi_tensor_scale(int64_t chunk_size, const at::Tensor& noop_flag,
                        const py::sequence& tensor_lists, double scale);
void multi_tensor_axpby(int64_t chunk_size, const at::Tensor& noop_flag,
                        const py::sequence& tensor_lists, double a, double b, int64_t arg_to_check);
std::pair<at::Tensor, at::Tensor> multi_tensor_l2norm(int64_t chunk_size,
                                                      const at::Tensor& noop_flag,
                                                      const py::sequence& tensor_lists,
                                                      bool per_tensor);
std::pair<at::Tensor, at::Tensor> multi_tensor_unscale_l2norm(int64_t chunk_size,
                                                              const at::Tensor& noop_flag,
                                                              const py::sequence& tensor_lists,
                                                              const at::Tensor& inv_scale,
                                                              bool per_tensor);

void multi_tensor_adam(int64_t chunk_size, const at::Tensor& noop_flag,
                       const py::sequence& tensor_lists, const Number& lr, double beta1,
                       double beta2, double eps, int64_t step, int64_t mode, bool bias_correction,
                       double weight_decay);
void multi_tensor_adagrad(int64_t chunk_size, const at::Tensor& noop_flag,
                          const py::sequence& tensor_lists, const Number& lr, double eps,
                          int64_t mode, double weight_decay);
void multi_tensor_lamb(int64_t chunk_size, const at::Tensor& noop_flag,
                       const py::sequence& tensor_lists, const Number& lr, double beta1,
                       double beta2, double eps, int64_t step, bool bias_correction,
                       double weight_decay, int64_t grad_averaging, int64_t mode,
                       const Number& global_grad_norm, double max_grad_norm, bool use_nvlamb);
void multi_tensor_novograd(int64_t chunk_size, const at::Tensor& noop_flag,
                           const py::sequence& tensor_lists, const at::Tensor& grad_norms,
                           const Number& lr, double beta1, double beta2, double eps, int64_t step,
                           bool bias_correction, double weight_decay, bool grad_averaging,
                           int64_t moment_mode, int64_t norm_type);
void multi_tensor_sgd(int64_t chunk_size, const at::Tensor& noop_flag,
                      const py::sequence& tensor_lists, double weight_decay, double momentum,
                      double dampening, const Number& lr, bool nesterov, bool first_run,
                      bool wd_after_momentum, double scale);

at::Tensor update_scale_hysteresis(const at::Tensor& current_scale,
                                   const at::Tensor& growth_tracker,
                                   const at::Tensor& hysteresis_tracker,
                                   const at::Tensor& found_inf, double growth_factor,
                                   double backoff_factor, int64_t growth_interval,
                                   int64_t hysteresis);

// torch's clip_grad_norm_ of the parameters' gradients, for the 2-norm: the norm, float32; or none,
// where nothing is done because the gradients are what only torch's function takes.
std::optional<at::Tensor> clip_grad_norm_(const py::sequence& parameters, double max_norm,
                                          bool error_if_nonfinite);

// Changes gradients as LARC does (wrappers/larc.py), in place, without waiting for the device.
// roots: float64 [n, 4], of which columns 0 and 3 are the 2-norms of gradients and weights. scale:
// what the gradients carry. Returns the scale that they keep with `keeps`, else none.
std::optional<at::Tensor> larc_(const py::sequence& grads, const py::sequence& weights,
                                const at::Tensor& roots, const std::vector<py::dict>& groups,
                                double trust_coefficient, bool clip, double eps,
                                const std::optional<Number>& scale, bool keeps);

// A number of a struct of doubles that a tensor holds, by its offset in the struct.
inline at::Tensor field(const at::Tensor& numbers, size_t offset) {
  return numbers.select(0, int64_t(offset / sizeof(double)));
}

void bind_amp_c(py::module_& m);

}  // namespace amp_mp::apex
