// Unboxed kernels for the matrix products, on which training spends its calls. A boxed kernel puts
// the arguments on a stack of IValues, which costs more than all of torch's autocast.
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "torch/casting/autocast_kernel.h"
#include "torch/casting/cast_cache.h"
#include "torch/casting/trace.h"

namespace amp_mp::casting {
namespace {

using c10::DispatchKeySet;

template <class... Args>
struct Product {
  Entry* e;
  c10::TypedOperatorHandle<at::Tensor(Args...)> op;

  at::Tensor operator()(DispatchKeySet keys, Args... args) {
    const OpPolicy policy = e->policy.load(std::memory_order_relaxed);
    const bool if_large = policy == OpPolicy::low_precision_if_large;
    if ((!if_large && policy != OpPolicy::low_precision) || is_tracing()) {
      torch::jit::Stack stack{c10::IValue(args)...};
      BoxedKernel{e}(op, keys, &stack);
      return std::move(stack[0]).toTensor();
    }
    const DispatchKeySet below = keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, e->key);
    const at::ScalarType low = at::autocast::get_autocast_dtype(e->device);
    const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
    at::ScalarType to = low;
    if (if_large && e->depends_on_size()) {
      const at::Tensor* tensors[] = {tensor_of(args)...};
      const at::Tensor& left = *tensors[e->operands.left];
      if (!is_faster(low, left, *tensors[e->operands.right], e->operands.transposed)) {
        const at::ScalarType type = left.scalar_type();
        const auto fits = [&](const at::Tensor* t) { return !t || t->scalar_type() == type; };
        if (std::ranges::all_of(tensors, fits)) return op.redispatch(below, args...);
        to = at::kFloat;
      }
    }
    return op.redispatch(below, argument(args, to)...);
  }

  static const at::Tensor* tensor_of(const at::Tensor& t) { return &t; }
  static const at::Tensor* tensor_of(const std::optional<at::Tensor>& t) {
    return t ? &*t : nullptr;
  }
  static const at::Tensor* tensor_of(const at::Scalar&) { return nullptr; }

  at::Tensor argument(const at::Tensor& t, at::ScalarType to) const {
    return e->is_eligible(t) ? cast(t, to) : t;
  }
  std::optional<at::Tensor> argument(const std::optional<at::Tensor>& t, at::ScalarType to) const {
    return t && t->defined() ? argument(*t, to) : t;
  }
  static const at::Scalar& argument(const at::Scalar& s, at::ScalarType) { return s; }
};

template <class... Args>
torch::CppFunction product(Entry* e, const c10::OperatorHandle& op) {
  return torch::CppFunction(Product<Args...>{e, op.typed<at::Tensor(Args...)>()});
}

}  // namespace

torch::CppFunction kernel_of(Entry* e, const c10::OperatorHandle& op) {
  using T = const at::Tensor&;
  using S = const at::Scalar&;
  const std::string& n = e->name;
  if (n == "aten::linear") return product<T, T, const std::optional<at::Tensor>&>(e, op);
  if (n == "aten::mm" || n == "aten::matmul" || n == "aten::bmm") return product<T, T>(e, op);
  if (n == "aten::addmm" || n == "aten::baddbmm") return product<T, T, T, S, S>(e, op);
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<BoxedKernel>(e));
}

}  // namespace amp_mp::casting
