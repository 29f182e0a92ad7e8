#include "fallback.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "aliases.h"
#include "current_stream.h"
#include "late.h"
#include "ledger.h"
#include "runtime.h"

namespace pretend_gpu {
namespace {

using c10::IValue;

// Of operators whose result's size the host has to know, or that return a value to the host.
const std::set<std::string> kSyncs = {
    "aten::nonzero",          "aten::masked_select", "aten::_unique",
    "aten::_unique2",         "aten::unique_dim",    "aten::unique_consecutive",
    "aten::bincount",         "aten::equal",         "aten::unique_dim_consecutive",
    "aten::repeat_interleave"};
// Those that take tensors of the CPU of any size among their arguments.
const std::set<std::string> kTakeFromHost = {"aten::index", "aten::_index_put_impl_",
                                             "aten::_pack_padded_sequence"};

class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : op_(op), schema_(op.schema()) {}

  void run(Stack* stack) {
    const size_t count = schema_.arguments().size(), first = stack->size() - count;
    const bool waits = kSyncs.count(schema_.name()) ||
                       (schema_.name() == "aten::_index_put_impl_" && puts_by_mask(*stack, first));
    const Stack given(stack->end() - int64_t(count), stack->end());
    for (size_t i = 0; i < count; ++i) replace(schema_.arguments()[i], (*stack)[first + i]);
    const std::string name = c10::toString(op_.operator_name());
    TORCH_CHECK(device_, "pretend GPU: ", name, " has no argument on a CUDA device");
    const bool computes = !is_view();
    if (waits) note_sync(name);
    if (auto late = computes && !waits ? run_late(op_, given, *device_) : std::nullopt) {
      for (IValue& result : *late)
        map_tensors(result, [&](const at::Tensor& t) {
          largest_ = std::max(largest_, t.numel());
          return t;
        });
      stack->erase(stack->end() - int64_t(count), stack->end());
      stack->insert(stack->end(), late->begin(), late->end());
      if (largest_ > 0) note_operator(name);
      return;
    }
    const bool records = computes && cuda_on_cpu::under_way();
    const Stack arguments(stack->end() - int64_t(count), stack->end());
    if (computes) settle(*device_);
    if (records) {
      run_in_vain(stack);
    } else {
      run_on_host(op_, stack);
    }
    aliases_.write_back();
    std::vector<at::Tensor> made;  // undefined where a result lies in an argument's memory
    for (size_t i = stack->size() - schema_.returns().size(); i < stack->size(); ++i)
      map_tensors((*stack)[i], [&](const at::Tensor& t) {
        const at::Tensor back = result(t);
        if (records) made.push_back(aliases_.contain(t) ? at::Tensor() : Aliases().of(back));
        return back;
      });
    if (records) {
      record(arguments, std::move(made));
    } else if (computes && largest_ > 0) {
      note_operator(name);
    }
  }

 private:
  // Only the results' sizes are wanted: what is written in place gets its old contents back.
  void run_in_vain(Stack* stack) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    std::vector<at::Tensor> before;
    for (const at::Tensor& t : written_) before.push_back(t.clone());
    run_on_host(op_, stack);
    for (size_t i = 0; i < written_.size(); ++i) {
      TORCH_CHECK(written_[i].sizes() == before[i].sizes(),
                  "pretend GPU: an operator that resizes its result is captured");
      written_[i].copy_(before[i]);
    }
  }

  // A replay runs the operator on the same memory, and its results go where they went first.
  void record(const Stack& arguments, std::vector<at::Tensor> made) {
    cuda_on_cpu::under_way()->add(
        [op = op_, arguments, made = std::move(made)] { run_into(op, arguments, made); });
  }

  void replace(const c10::Argument& argument, IValue& value) {
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    if (value.isDevice()) {
      if (!device_) device_ = value.toDevice();
      value = at::Device(at::kCPU);
      return;
    }
    map_tensors(value, [&](const at::Tensor& t) {
      if (!t.is_cuda()) {
        check_host(t);
        const bool may_change = !t.unsafeGetTensorImpl()->is_wrapped_number();
        return may_change && cuda_on_cpu::under_way() ? t.clone() : t;  // a graph keeps the number
      }
      if (!device_) device_ = t.device();
      check_same_device(t.device() == *device_, t.device());
      largest_ = std::max(largest_, written ? t.numel() : 0);
      const at::Tensor alias = aliases_.of(t);
      if (written) written_.push_back(alias);
      return alias;
    });
  }

  // Numbers of the host may go to any kernel, arrays to few.
  void check_host(const at::Tensor& t) const {
    check_same_device(t.dim() == 0 || kTakeFromHost.count(schema_.name()), t.device());
  }

  void check_same_device(bool ok, const at::Device& other) const {
    TORCH_CHECK(ok,
                "Expected all tensors to be on the same device, but found at least two: ", other,
                " and ", device_.value_or(at::Device(at::kCUDA)), " (", schema_.name(), ")");
  }

  // Where a mask is an index, the host has to know how many elements it selects; unless all get the
  // same number of the host's: that is masked_fill.
  static bool puts_by_mask(const torch::jit::Stack& stack, size_t first) {
    if (stack[first + 2].toTensor().is_cpu()) return false;
    for (const std::optional<at::Tensor>& t : stack[first + 1].toOptionalTensorVector())
      if (t && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte)) return true;
    return false;
  }

  bool is_view() const {
    if (schema_.returns().empty()) return false;
    for (const c10::Argument& r : schema_.returns())
      if (!r.alias_info() || r.alias_info()->isWrite()) return false;
    return true;
  }

  at::Tensor result(const at::Tensor& t) {
    largest_ = std::max(largest_, t.numel());
    return aliases_.back(t, *device_);
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Aliases aliases_;
  std::optional<at::Device> device_;
  std::vector<at::Tensor> written_;
  int64_t largest_ = 0;  // number of elements that are written: a kernel that has none is not run
};

}  // namespace

void run_on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op).run(stack);
}

namespace {

// Where a torch for CUDA has a kernel, which would need a driver: what the dispatcher would take if
// it had none.
void run_without_torchs(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  using Key = c10::DispatchKey;
  for (const Key composite : {Key::CompositeExplicitAutogradNonFunctional,
                              Key::CompositeExplicitAutograd, Key::CompositeImplicitAutograd})
    if (op.hasKernelForDispatchKey(composite)) return op.callBoxedForDispatchKey(composite, *stack);
  run_on_the_cpu(op, stack);
}

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

// Operators of lists directly, not by the fallback: composites come before that, and these would be
// loops over single tensors where a GPU has one kernel for all.
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  Silent silent;  // about kernels that are replaced
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0) continue;
    const std::string full = c10::toString(name);
    if (name.name.rfind("aten::_foreach_", 0) == 0) {
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_the_cpu>());
    } else if (op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) {
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_without_torchs>());
    }
  }
}

// In a torch for CUDA rms_norm is this operator, whose derivative has a kernel for CUDA alone.
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) {
  m.impl("_fused_rms_norm", torch::CppFunction::makeFromBoxedFunction<&run_without_torchs>());
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_the_cpu>());
}

}  // namespace pretend_gpu
