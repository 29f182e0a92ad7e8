#include "torch/casting/autocast_kernel.h"

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <mutex>

#include "torch/casting/cast_cache.h"

namespace amp_mp::casting {
namespace {

using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

// Never destroyed: threads may still be in a kernel when the process ends.
std::mutex& mutex = *new std::mutex;
std::vector<Cast>& log = *new std::vector<Cast>;
std::atomic<Trace> trace{Trace::off};

bool is_low(at::ScalarType t) { return t == at::kHalf || t == at::kBFloat16; }

bool is_eligible(const at::Tensor& t, at::DeviceType device) {
  return t.defined() && t.is_floating_point() && t.scalar_type() != at::kDouble &&
         t.device().type() == device;
}

void note(const Entry& e, const std::string& argument, at::ScalarType from, at::ScalarType to,
          bool cached) {
  const Cast cast{e.name, argument, c10::toString(from), c10::toString(to), cached};
  if (trace.load() == Trace::print && !cached)
    fprintf(stderr, "amp_mp: %s(%s): %s -> %s\n", cast.op.c_str(), cast.argument.c_str(),
            cast.from.c_str(), cast.to.c_str());
  const std::lock_guard<std::mutex> lock(mutex);
  if (trace.load() == Trace::record) log.push_back(cast);
}

// Every tensor among the arguments that may be cast, lists entered: f(tensor, argument) gives what
// takes its place, or an undefined tensor to leave it.
template <class F>
void map_tensors(const Entry& e, Stack* stack, const F& f) {
  const size_t count = e.written.size(), first = stack->size() - count;
  for (size_t i = 0; i < count; ++i) {
    if (e.written[i]) continue;
    IValue& value = (*stack)[first + i];
    const auto one = [&](const at::Tensor& t) {
      return is_eligible(t, e.device) ? f(t, i) : at::Tensor();
    };
    if (value.isTensor()) {
      if (at::Tensor cast = one(value.toTensor()); cast.defined()) value = std::move(cast);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> mapped;  // the caller's list stays as it is
      for (const at::Tensor& t : value.toTensorVector()) {
        const at::Tensor cast = one(t);
        mapped.push_back(cast.defined() ? cast : t);
      }
      value = std::move(mapped);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> mapped;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector()) {
        const at::Tensor cast = t.has_value() ? one(*t) : at::Tensor();
        mapped.push_back(cast.defined() ? std::optional<at::Tensor>(cast) : t);
      }
      value = std::move(mapped);
    }
  }
}

void cast_all(const Entry& e, const c10::FunctionSchema& schema, Stack* stack, at::ScalarType to) {
  map_tensors(e, stack, [&](const at::Tensor& t, size_t argument) {
    if (t.scalar_type() == to) return at::Tensor();
    bool cached = false;
    at::Tensor result = cast(t, to, &cached);
    if (trace.load(std::memory_order_relaxed) != Trace::off)
      note(e, schema.arguments()[argument].name(), t.scalar_type(), to, cached);
    return result;
  });
}

// The dtype all arguments promote to: float32 beats both low precisions, and so do two different
// ones.
std::optional<at::ScalarType> widest(const Entry& e, Stack* stack) {
  std::optional<at::ScalarType> wide;
  map_tensors(e, stack, [&](const at::Tensor& t, size_t) {
    const at::ScalarType type = t.scalar_type();
    wide = !wide || *wide == type ? type : at::kFloat;
    return at::Tensor();
  });
  return wide;
}

// Where an argument is written, its dtype decides: the others follow it.
std::optional<at::ScalarType> written_dtype(const Entry& e, const Stack* stack) {
  const size_t first = stack->size() - e.written.size();
  for (size_t i = 0; i < e.written.size(); ++i) {
    const IValue& value = (*stack)[first + i];
    if (e.written[i] && value.isTensor() && is_eligible(value.toTensor(), e.device))
      return value.toTensor().scalar_type();
  }
  return {};
}

// Only bfloat16 on a CPU has products that are too small for it; float16 is slower there at any
// size.
bool by_size(const Entry& e, at::ScalarType low) {
  return low == at::kBFloat16 && e.device == at::kCPU && e.operands.left >= 0;
}

struct Kernel : c10::OperatorKernel {
  explicit Kernel(Entry* entry) : e(entry) {}

  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const OpPolicy policy = e->policy.load(std::memory_order_relaxed);
    const auto through = [&] {  // as an operator on no list: what is inside may be cast
      op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, e->key), stack);
    };
    if (policy == OpPolicy::stock)
      return e->stock ? e->stock->callBoxed(op, keys, stack) : through();
    if (policy == OpPolicy::unchanged) return through();
    const at::ScalarType low = at::autocast::get_autocast_dtype(e->device);
    // From here on nothing is cast but by us, neither by the casts nor inside the operator.
    const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
    const c10::FunctionSchema& schema = op.schema();
    std::optional<at::ScalarType> to;
    switch (policy) {
      case OpPolicy::low_precision: to = low; break;
      case OpPolicy::float32: to = at::kFloat; break;
      case OpPolicy::bfloat16_only: to = low == at::kBFloat16 ? low : at::kFloat; break;
      case OpPolicy::widest: to = widest(*e, stack); break;
      case OpPolicy::low_precision_if_large:
        to = by_size(*e, low) && !is_large(e->operands, *stack) ? widest(*e, stack) : low;
        break;
      case OpPolicy::set_output_dtype: set_dtype(schema, stack); break;
      case OpPolicy::banned: refuse(schema, stack); break;
      default: break;
    }
    if (e->writes) {
      const auto fixed = written_dtype(*e, stack);
      TORCH_CHECK(!(fixed && is_low(*fixed) && policy == OpPolicy::float32), "amp_mp: cannot call ",
                  e->name, ", which writes in place and is to run in float32, on a ", *fixed,
                  " tensor: call the form that returns a new tensor");
      if (fixed) to = fixed;
    }
    if (to) cast_all(*e, schema, stack, *to);
    through();
  }

 private:
  void set_dtype(const c10::FunctionSchema& schema, Stack* stack) const {
    bool low = false;
    map_tensors(*e, stack, [&](const at::Tensor& t, size_t) {
      low = low || is_low(t.scalar_type());
      return at::Tensor();
    });
    if (!low || e->dtype_argument < 0) return;
    IValue& dtype = (*stack)[stack->size() - schema.arguments().size() + e->dtype_argument];
    if (dtype.isNone()) dtype = at::kFloat;
  }

  void refuse(const c10::FunctionSchema& schema, Stack* stack) const {
    map_tensors(*e, stack, [&](const at::Tensor& t, size_t argument) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          !is_low(t.scalar_type()), "amp_mp: ", e->name, " is unsafe in low precision (argument ",
          schema.arguments()[argument].name(), " is ", t.scalar_type(),
          "). For binary_cross_entropy use binary_cross_entropy_with_logits, which is safe "
          "and also faster; or allow_banned=True computes it in float32");
      return at::Tensor();
    });
  }

  Entry* e;
};

// The products that training spends its calls on: cast without a detour over a stack of IValues,
// which costs more than torch's whole autocast.
template <class... Args>
struct Product {
  Entry* e;
  c10::TypedOperatorHandle<at::Tensor(Args...)> op;
  int left, right;  // the factors among the arguments

  at::Tensor operator()(DispatchKeySet keys, Args... args) {
    const OpPolicy policy = e->policy.load(std::memory_order_relaxed);
    const bool if_large = policy == OpPolicy::low_precision_if_large;
    if ((!if_large && policy != OpPolicy::low_precision) ||
        trace.load(std::memory_order_relaxed) != Trace::off) {
      Stack stack{IValue(args)...};
      Kernel{e}(op, keys, &stack);
      return std::move(stack[0]).toTensor();
    }
    const DispatchKeySet below = keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, e->key);
    const at::ScalarType low = at::autocast::get_autocast_dtype(e->device);
    const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
    at::ScalarType to = low;
    if (if_large && by_size(*e, low)) {
      const at::Tensor* tensors[] = {tensor_of(args)...};
      if (!is_large(*tensors[left], *tensors[right], e->operands.transposed)) {
        const at::ScalarType type = tensors[left]->scalar_type();
        const bool uniform = (is_of(args, type) && ...);
        if (uniform) return op.redispatch(below, args...);
        to = at::kFloat;
      }
    }
    return op.redispatch(below, argument(args, to)...);
  }

  static const at::Tensor* tensor_of(const at::Tensor& t) { return &t; }
  template <class Other>
  static const at::Tensor* tensor_of(const Other&) {
    return nullptr;
  }

  static bool is_of(const at::Tensor& t, at::ScalarType type) { return t.scalar_type() == type; }
  static bool is_of(const std::optional<at::Tensor>& t, at::ScalarType type) {
    return !t || t->scalar_type() == type;
  }
  static bool is_of(const at::Scalar&, at::ScalarType) { return true; }

  at::Tensor argument(const at::Tensor& t, at::ScalarType to) const {
    return is_eligible(t, e->device) ? cast(t, to) : t;
  }
  std::optional<at::Tensor> argument(const std::optional<at::Tensor>& t, at::ScalarType to) const {
    return t && t->defined() ? argument(*t, to) : t;
  }
  static const at::Scalar& argument(const at::Scalar& s, at::ScalarType) { return s; }
};

template <class... Args>
torch::CppFunction product(Entry* e, const c10::OperatorHandle& op) {
  return torch::CppFunction(
      Product<Args...>{e, op.typed<at::Tensor(Args...)>(), e->operands.left, e->operands.right});
}

}  // namespace

torch::CppFunction kernel_of(Entry* e, const c10::OperatorHandle& op) {
  using T = const at::Tensor&;
  using S = const at::Scalar&;
  const std::string& n = e->name;
  if (n == "aten::linear") return product<T, T, const std::optional<at::Tensor>&>(e, op);
  if (n == "aten::mm" || n == "aten::matmul" || n == "aten::bmm") return product<T, T>(e, op);
  if (n == "aten::addmm" || n == "aten::baddbmm") return product<T, T, T, S, S>(e, op);
  return torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(e));
}

void set_trace(Trace value) { trace.store(value); }

std::vector<Cast> take_log() {
  const std::lock_guard<std::mutex> lock(mutex);
  return std::exchange(log, {});
}

}  // namespace amp_mp::casting
