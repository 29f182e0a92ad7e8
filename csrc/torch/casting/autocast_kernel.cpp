#include "torch/casting/autocast_kernel.h"

#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "torch/casting/cast_cache.h"
#include "torch/casting/torch_cache.h"
#include "torch/casting/trace.h"

namespace amp_mp::casting {
namespace {

using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::peek;
using torch::jit::Stack;

// Calls f(tensor, argument) for every tensor that may be cast, also in lists, but not for arguments
// that are written. f returns the tensor's replacement, or an undefined tensor to keep it.
template <class F>
void map_tensors(const Entry& e, Stack* stack, const F& f) {
  for (size_t i = 0; i < e.written.size(); ++i) {
    if (e.written[i]) continue;
    IValue& value = peek(*stack, i, e.written.size());
    const auto one = [&](const at::Tensor& t) { return e.is_eligible(t) ? f(t, i) : at::Tensor(); };
    if (value.isTensor()) {
      if (at::Tensor cast = one(value.toTensor()); cast.defined()) value = std::move(cast);
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      c10::List<IValue> mapped = value.toList().copy();  // the caller's list is not changed
      for (size_t k = 0; k < mapped.size(); ++k)
        if (const IValue item = mapped.get(k); item.isTensor())
          if (at::Tensor cast = one(item.toTensor()); cast.defined()) mapped.set(k, cast);
      value = std::move(mapped);
    }
  }
}

void cast_all(const Entry& e, const c10::FunctionSchema& schema, Stack* stack, at::ScalarType to) {
  map_tensors(e, stack, [&](const at::Tensor& t, size_t argument) {
    if (t.scalar_type() == to) return at::Tensor();
    bool cached = false;
    at::Tensor result = cast(t, to, &cached);
    if (is_tracing())
      trace_cast(e.name, schema.arguments()[argument].name(), t.scalar_type(), to, cached);
    return result;
  });
}

// The dtype that all arguments promote to; float32 if two of them differ.
std::optional<at::ScalarType> widest(const Entry& e, Stack* stack) {
  std::optional<at::ScalarType> wide;
  map_tensors(e, stack, [&](const at::Tensor& t, size_t) {
    const at::ScalarType type = t.scalar_type();
    wide = !wide || *wide == type ? type : at::kFloat;
    return at::Tensor();
  });
  return wide;
}

// The dtype of the argument that is written, which the other arguments then get too.
std::optional<at::ScalarType> written_dtype(const Entry& e, const Stack* stack) {
  for (size_t i = 0; i < e.written.size(); ++i) {
    const IValue& value = peek(*stack, i, e.written.size());
    if (e.written[i] && value.isTensor() && e.is_eligible(value.toTensor()))
      return value.toTensor().scalar_type();
  }
  return {};
}

// OpPolicy::set_output_dtype: passes dtype=float32 if an argument is low precision and the caller
// gave no dtype.
void set_dtype(const Entry& e, Stack* stack) {
  bool low = false;
  map_tensors(e, stack, [&](const at::Tensor& t, size_t) {
    low = low || is_low(t.scalar_type());
    return at::Tensor();
  });
  if (!low || e.dtype_argument < 0) return;
  IValue& dtype = peek(*stack, size_t(e.dtype_argument), e.written.size());
  if (dtype.isNone()) dtype = at::kFloat;
}

// OpPolicy::banned: raises if an argument is low precision.
void refuse(const Entry& e, const c10::FunctionSchema& schema, Stack* stack) {
  map_tensors(e, stack, [&](const at::Tensor& t, size_t argument) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !is_low(t.scalar_type()), "amp_mp: ", e.name, " is unsafe in low precision (argument ",
        schema.arguments()[argument].name(), " is ", t.scalar_type(),
        "). In place of binary_cross_entropy and BCELoss use binary_cross_entropy_with_logits or "
        "torch.nn.BCEWithLogitsLoss, which take the numbers before the sigmoid and are safe, and "
        "also faster; or allow_banned=True computes it in float32");
    return at::Tensor();
  });
}

// Calls torch's own autocast kernel. Outside of any region torch would not clear its cache until an
// optimizer steps: then it caches nothing.
void call_stock(const Entry& e, const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  struct CacheSwitch {
    explicit CacheSwitch(bool on) : before(at::autocast::is_autocast_cache_enabled()) {
      at::autocast::set_autocast_cache_enabled(before && on);
    }
    ~CacheSwitch() { at::autocast::set_autocast_cache_enabled(before); }
    bool before;
  } cache(open_regions() > 0);
  e.stock->callBoxed(op, keys, stack);
}

// The dtype to cast arguments to, or nullopt. `low` is autocast's dtype.
std::optional<at::ScalarType> dtype_for(OpPolicy policy, const Entry& e, Stack* stack,
                                        at::ScalarType low) {
  const auto factor = [&](int i) -> const at::Tensor& {
    return peek(*stack, size_t(i), e.written.size()).toTensor();
  };
  const Operands& of = e.operands;
  switch (policy) {
    case OpPolicy::low_precision: return low;
    case OpPolicy::float32: return at::kFloat;
    case OpPolicy::bfloat16_only: return low == at::kBFloat16 ? low : at::kFloat;
    case OpPolicy::widest: return widest(e, stack);
    case OpPolicy::low_precision_if_large:
      if (!e.depends_on_size() || is_faster(low, factor(of.left), factor(of.right), of.transposed))
        return low;
      return widest(e, stack);
    default: return {};
  }
}

}  // namespace

void BoxedKernel::operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const OpPolicy policy = e->policy.load(std::memory_order_relaxed);
  const auto call_below = [&] {
    op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, e->key), stack);
  };
  if (policy == OpPolicy::stock && e->stock) return call_stock(*e, op, keys, stack);
  if (policy == OpPolicy::stock || policy == OpPolicy::unchanged) return call_below();
  const at::ScalarType low = at::autocast::get_autocast_dtype(e->device);
  // Autocast is off from here on: neither the casts nor the operators inside this one are cast.
  // With the policies above it stays on, so that operators inside are cast by their own policies.
  const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
  const c10::FunctionSchema& schema = op.schema();
  if (policy == OpPolicy::banned) refuse(*e, schema, stack);
  std::optional<at::ScalarType> to;
  if (const auto fixed = e->writes ? written_dtype(*e, stack) : std::nullopt) {
    if (policy == OpPolicy::float32 && is_low(*fixed)) {
      TORCH_CHECK_NOT_IMPLEMENTED(!e->in_place, "amp_mp: cannot call ", e->name,
                                  ", which writes in place and is to run in float32, on a ", *fixed,
                                  " tensor: call the form that returns a new tensor");
      return call_below();  // with out=: in float32 as far as torch's kernel computes in it
    }
    to = fixed;
  } else {
    if (policy == OpPolicy::set_output_dtype) set_dtype(*e, stack);
    to = dtype_for(policy, *e, stack, low);
  }
  if (to) cast_all(*e, schema, stack, *to);
  call_below();
}

}  // namespace amp_mp::casting
