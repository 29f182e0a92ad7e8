#include "torch/autocast.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "torch/cast_cache.h"

namespace amp_mp::casting {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

// What is known of one operator on one device type. Never freed: kernels may still be running.
struct Entry {
  std::string name;
  at::DeviceType device;
  DispatchKey key;
  std::atomic<Policy> policy{Policy::stock};
  std::optional<c10::SafeKernelFunction> stock;  // torch's own autocast kernel, if it has one
  int dtype_argument = -1;                       // index of `dtype`, if the schema has one
  std::vector<bool> written;                     // arguments that are written: in-place, out=
  bool writes = false;
};

// Never destroyed: threads may still be in a kernel when the process ends, and the dispatcher may
// be gone by then.
using Entries = std::map<std::pair<std::string, std::string>, std::unique_ptr<Entry>>;
std::mutex& mutex = *new std::mutex;
Entries& entries = *new Entries;  // by device and operator
std::vector<std::unique_ptr<torch::Library>>& registrations =
    *new std::vector<std::unique_ptr<torch::Library>>;
std::atomic<Trace> trace{Trace::off};
std::vector<Cast>& log = *new std::vector<Cast>;

bool is_low(at::ScalarType t) { return t == at::kHalf || t == at::kBFloat16; }

bool is_eligible(const at::Tensor& t, at::DeviceType device) {
  return t.defined() && t.is_floating_point() && t.scalar_type() != at::kDouble &&
         t.device().type() == device;
}

void note(const Entry& e, const std::string& argument, at::ScalarType from, at::ScalarType to) {
  const Cast cast{e.name, argument, c10::toString(from), c10::toString(to)};
  if (trace.load() == Trace::print)
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
    if (trace.load(std::memory_order_relaxed) != Trace::off)
      note(e, schema.arguments()[argument].name(), t.scalar_type(), to);
    return cast(t, to);
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

struct Kernel : c10::OperatorKernel {
  explicit Kernel(Entry* entry) : e(entry) {}

  void operator()(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const Policy policy = e->policy.load(std::memory_order_relaxed);
    const auto through = [&] {  // as an operator on no list: what is inside may be cast
      op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, e->key), stack);
    };
    if (policy == Policy::stock) return e->stock ? e->stock->callBoxed(op, keys, stack) : through();
    if (policy == Policy::unchanged) return through();
    // From here on nothing is cast but by us, neither by the casts nor inside the operator.
    const c10::impl::ExcludeDispatchKeyGuard guard(c10::autocast_dispatch_keyset);
    const c10::FunctionSchema& schema = op.schema();
    const at::ScalarType low = at::autocast::get_autocast_dtype(e->device);
    std::optional<at::ScalarType> to;
    switch (policy) {
      case Policy::low_precision: to = low; break;
      case Policy::float32: to = at::kFloat; break;
      case Policy::bfloat16_only: to = low == at::kBFloat16 ? low : at::kFloat; break;
      case Policy::widest: to = widest(*e, stack); break;
      case Policy::set_output_dtype: set_dtype(schema, stack); break;
      case Policy::banned: refuse(schema, stack); break;
      default: break;
    }
    if (e->writes) {
      const auto fixed = written_dtype(*e, stack);
      TORCH_CHECK(!(fixed && is_low(*fixed) && policy == Policy::float32), "amp_mp: cannot call ",
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

DispatchKey key_of(const std::string& device) {
  TORCH_CHECK_VALUE(device == "cpu" || device == "cuda",
                    "device must be \"cpu\" or \"cuda\", found \"", device, '"');
  return device == "cpu" ? DispatchKey::AutocastCPU : DispatchKey::AutocastCUDA;
}

// Null where the running torch has no such operator.
Entry* find_or_register(const std::string& device, const std::string& name) {
  const auto known = entries.find({device, name});
  if (known != entries.end()) return known->second.get();
  const size_t dot = name.find('.'), colons = name.find("::");
  TORCH_CHECK_VALUE(colons != std::string::npos,
                    "op must look like \"aten::mm\" or \"aten::sum.dim_IntList\", found \"", name,
                    '"');
  const std::string base = name.substr(0, dot),
                    overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  const auto op = c10::Dispatcher::singleton().findSchema({base, overload});
  if (!op) return nullptr;
  auto entry = std::make_unique<Entry>();
  entry->name = name;
  entry->key = key_of(device);
  entry->device = device == "cpu" ? at::kCPU : at::kCUDA;
  if (op->hasKernelForDispatchKey(entry->key))
    entry->stock = op->getComputedKernelForDispatchKey(entry->key);
  for (const auto& argument : op->schema().arguments()) {
    if (argument.name() == "dtype") entry->dtype_argument = int(entry->written.size());
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    entry->written.push_back(written);
    entry->writes = entry->writes || written;
  }
  // torch warns once that a kernel is overridden; that is the point here.
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, base.substr(0, colons),
                                                  entry->key, __FILE__, __LINE__);
  library->impl(name.substr(colons + 2).c_str(),
                torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(entry.get())));
  registrations.push_back(std::move(library));
  return entries.emplace(std::pair(device, name), std::move(entry)).first->second.get();
}

}  // namespace

const std::vector<std::string>& policy_names() {
  static const std::vector<std::string> names = {"stock",   "unchanged",    "low_precision",
                                                 "float32", "widest",       "set_output_dtype",
                                                 "banned",  "bfloat16_only"};
  return names;
}

std::string set_policy(const std::string& device, const std::string& op,
                       const std::string& policy) {
  const auto& names = policy_names();
  const auto found = std::find(names.begin(), names.end(), policy);
  TORCH_CHECK_VALUE(found != names.end(), "policy must be one of ", c10::Join(", ", names),
                    "; found \"", policy, '"');
  const std::lock_guard<std::mutex> lock(mutex);
  Entry* entry = find_or_register(device, op);
  if (!entry) return "";
  return names[size_t(entry->policy.exchange(Policy(found - names.begin())))];
}

std::vector<Row> policies(const std::string& device) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<Row> rows;
  for (const auto& [key, entry] : entries)
    if (key.first == device)
      rows.push_back({key.second, policy_names()[size_t(entry->policy.load())]});
  return rows;
}

void uninstall() {
  const std::lock_guard<std::mutex> lock(mutex);
  registrations.clear();
  for (auto& [key, entry] : entries) static_cast<void>(entry.release());  // see Entry
  entries.clear();
}

void set_trace(Trace value) { trace.store(value); }

std::vector<Cast> take_log() {
  const std::lock_guard<std::mutex> lock(mutex);
  return std::exchange(log, {});
}

}  // namespace amp_mp::casting
