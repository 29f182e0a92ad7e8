#include "late.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "aliases.h"
#include "current_stream.h"
#include "memory.h"

namespace pretend_gpu {
namespace {

using c10::IValue;

// Those whose results' sizes follow from their arguments', without the underscore of those in
// place.
const std::string kLate =
    " "
    "_fused_adamw abs add addcdiv addcmul addmm amax amin arange bitwise_and bitwise_not "
    "bitwise_or bmm cat clamp clamp_max clamp_min div eq exp fill ge gelu gt isinf isnan le "
    "lerp log logical_and logical_not logical_or lt maximum mean minimum mm mul ne neg pow "
    "reciprocal relu rsqrt sigmoid sign silu sqrt sub sum tanh tanh_backward "
    "threshold_backward where zero ";
// Without memory these cost a dozen other operators, which a profiler would show.
const std::string kProducts = " addmm bmm mm ";

// Between spaces, as the lists have it.
std::string bare_name(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  const size_t begin = name.find("::") + 2, end = name.size() - (name.ends_with('_') ? 1 : 0);
  return ' ' + name.substr(begin, end - begin) + ' ';
}

bool is_listed(const c10::OperatorHandle& op) {
  const std::string name = bare_name(op);
  return op.schema().name().starts_with("aten::") &&
         (name.starts_with(" _foreach_") || kLate.find(name) != std::string::npos);
}

// Whether the arguments are those of a product that is written where its result fits.
bool fits(const c10::OperatorHandle& op, Stack arguments) {
  std::vector<at::Tensor> found;
  for (IValue& value : arguments)
    map_tensors(value, [&](const at::Tensor& t) { return found.emplace_back(t); });
  if (op.operator_name().overload_name != "out") return false;
  const at::Tensor &out = found.back(), &a = found.end()[-3], &b = found.end()[-2];
  for (const at::Tensor& t : found)
    if (t.scalar_type() != out.scalar_type()) return false;
  return out.dim() >= 2 && out.size(-2) == a.size(-2) && out.size(-1) == b.size(-1) &&
         a.size(-1) == b.size(-2);
}

// A tensor without memory in the place of one on the device.
at::Tensor without_memory(const at::Tensor& t) {
  at::Tensor meta = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
  if (t.unsafeGetTensorImpl()->is_wrapped_number())
    meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

}  // namespace

void map_tensors(IValue& value, const std::function<at::Tensor(const at::Tensor&)>& f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = f(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& t : value.toTensorVector()) mapped.push_back(t.defined() ? f(t) : t);
    value = std::move(mapped);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
      mapped.push_back(t && t->defined() ? std::optional<at::Tensor>(f(*t)) : t);
    value = std::move(mapped);
  }
}

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

void run_into(const c10::OperatorHandle& op, Stack stack, const std::vector<at::Tensor>& targets) {
  run_on_host(op, &stack);
  const at::AutoDispatchBelowADInplaceOrView guard;
  auto target = targets.begin();
  for (IValue& result : stack)
    map_tensors(result, [&](const at::Tensor& t) {
      if (target->defined()) target->copy_(t);
      ++target;
      return t;
    });
}

std::optional<Stack> run_late(const c10::OperatorHandle& op, const Stack& arguments,
                              const at::Device& device) {
  if (!cuda_on_cpu::is_delayed() || cuda_on_cpu::under_way() || !is_listed(op)) return std::nullopt;
  const bool is_product = kProducts.find(bare_name(op)) != std::string::npos;
  const bool has_sizes = !is_product && op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
  if (is_product ? !fits(op, arguments) : !has_sizes && !op.schema().returns().empty())
    return std::nullopt;
  for (const IValue& value : arguments)
    if (value.isDevice()) return std::nullopt;
  std::vector<std::pair<at::Tensor, at::Tensor>> metas;
  Stack meta = arguments, host = arguments;
  for (IValue& value : meta)
    map_tensors(value, [&](const at::Tensor& t) {
      if (!t.is_cuda()) return t;
      for (const auto& [original, known] : metas)
        if (original.is_same(t)) return known;
      metas.emplace_back(t, without_memory(t));
      return metas.back().second;
    });
  if (has_sizes) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &meta);
  } else {
    meta.erase(meta.begin(), meta.end() - (is_product ? 1 : 0));
  }
  const c10::DeviceGuard guard(device);
  for (const auto& [original, known] : metas) {  // `out`
    if (original.sizes() == known.sizes()) continue;
    if (original.numel() > 0) return std::nullopt;
    original.resize_(known.sizes());
  }
  Aliases aliases;
  for (IValue& value : host)
    map_tensors(value, [&](const at::Tensor& t) {
      if (t.is_cuda()) return aliases.of(t);
      return t.unsafeGetTensorImpl()->is_wrapped_number() ? t : t.clone();
    });
  std::vector<at::Tensor> targets;
  for (IValue& result : meta)
    map_tensors(result, [&](const at::Tensor& t) {
      targets.emplace_back();
      for (const auto& [original, known] : metas)
        if (known.is_same(t)) return original;
      const at::Tensor made = at::detail::empty_strided_generic(
          t.sizes(), t.strides(), allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
          t.scalar_type());
      targets.back() = Aliases().of(made);
      return made;
    });
  cuda_on_cpu::queue(
      current_stream(device.index()),
      [op, host = std::move(host), targets = std::move(targets)] { run_into(op, host, targets); });
  return meta;
}

}  // namespace pretend_gpu
