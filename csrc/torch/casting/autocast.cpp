// The table that gives each operator a policy, inside torch's own autocast: kernels are registered
// by operator name under the AutocastCPU and AutocastCUDA dispatch keys. They are called while
// autocast is on, in whichever way the operator is called (torch., Tensor., F., a module, C++).
//
// Registering changes the dispatcher's tables without any lock: do it before worker threads start.
// Changing the policy of a registered operator is an atomic store.
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <sstream>

#include "torch/bind.h"
#include "torch/casting/autocast_kernel.h"
#include "torch/casting/op_lists.h"
#include "torch/products/products.h"

namespace amp_mp::casting {
namespace {

// Never destroyed: when the process ends, threads may still be in a kernel, and the dispatcher may
// be destroyed already.
std::mutex& mutex = *new std::mutex;
using Entries = std::map<std::pair<std::string, std::string>, Entry*>;
Entries& entries = *new Entries;  // by device and operator

// The policies' names, in the order of the enum.
const std::vector<std::string>& policy_names() {
  static const std::vector<std::string> names = {
      "stock",  "unchanged",     "low_precision",         "float32", "widest", "set_output_dtype",
      "banned", "bfloat16_only", "low_precision_if_large"};
  return names;
}

// A list of op_lists.h: for each group the policy and the operators, with their namespace.
std::vector<std::pair<std::string, std::vector<std::string>>> op_list(const std::string& name) {
  std::vector<std::pair<std::string, std::vector<std::string>>> found;
  const auto add = [&](const auto& groups) {
    for (const OpGroup& group : groups) {
      found.emplace_back(group.policy, std::vector<std::string>());
      std::istringstream words(group.ops);
      for (std::string word; words >> word;) found.back().second.push_back("aten::" + word);
    }
  };
  if (name == "apex") add(kApexOps);
  if (name == "apex cpu") add(kApexCpuOps);
  if (name == "torch cpu") add(kTorchCpuOps);
  if (name == "torch cuda") add(kTorchCudaOps);
  return found;
}

// Null if the running torch has no such operator.
Entry* find_or_register(const std::string& device, const std::string& name) {
  const auto known = entries.find({device, name});
  if (known != entries.end()) return known->second;
  const size_t dot = name.find('.'), colons = name.find("::");
  TORCH_CHECK_VALUE(colons != std::string::npos,
                    "op must look like \"aten::mm\" or \"aten::sum.dim_IntList\", found \"", name,
                    '"');
  const std::string base = name.substr(0, dot),
                    overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  const auto op = c10::Dispatcher::singleton().findSchema({base, overload});
  if (!op) return nullptr;
  TORCH_CHECK_VALUE(device == "cpu" || device == "cuda",
                    "device must be \"cpu\" or \"cuda\", found \"", device, '"');
  auto* entry = new Entry;
  entry->name = name;
  entry->device = device == "cpu" ? at::kCPU : at::kCUDA;
  entry->key = at::autocast::get_autocast_dispatch_key_from_device_type(entry->device);
  if (op->hasKernelForDispatchKey(entry->key))
    entry->stock = op->getComputedKernelForDispatchKey(entry->key);
  for (const auto& argument : op->schema().arguments()) {
    if (argument.name() == "dtype") entry->dtype_argument = int(entry->written.size());
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    entry->written.push_back(written);
    entry->writes = entry->writes || written;
    entry->in_place = entry->in_place || (written && !argument.is_out());
  }
  entry->operands = operands_of(op->schema());
  const products::SilentOverride silent;
  entry->registration.emplace(torch::Library::IMPL, base.substr(0, colons), entry->key, __FILE__,
                              __LINE__);
  entry->registration->impl(name.substr(colons + 2).c_str(), kernel_of(entry, *op));
  entries.emplace(std::pair(device, name), entry);
  return entry;
}

// Sets an operator's policy; registers a kernel for the operator if it has none yet. `device` is
// "cpu" or "cuda", `op` a name such as "aten::mm" or "aten::pow.Tensor_Scalar". Returns the policy
// that the operator had, or an empty string if the running torch has no such operator (the lists
// are written for several versions of torch).
std::string set_policy(const std::string& device, const std::string& op,
                       const std::string& policy) {
  const auto& names = policy_names();
  const auto found = std::find(names.begin(), names.end(), policy);
  TORCH_CHECK_VALUE(found != names.end(), "policy must be one of ", c10::Join(", ", names),
                    "; found \"", policy, '"');
  const std::lock_guard<std::mutex> lock(mutex);
  Entry* entry = find_or_register(device, op);
  if (!entry) return "";
  const auto wanted = OpPolicy(found - names.begin());
  return names[size_t(entry->policy.exchange(wanted))];
}

// All registered operators, and their policies.
std::map<std::string, std::string> policies(const std::string& device) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::map<std::string, std::string> found;
  for (const auto& [key, entry] : entries)
    if (key.first == device) found[key.second] = policy_names()[size_t(entry->policy.load())];
  return found;
}

// Removes all registered kernels: the dispatch tables are as before. Not thread-safe.
void uninstall() {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& [key, entry] : entries) entry->registration.reset();
  entries.clear();
}

}  // namespace

void bind_policies(py::module_& m) {
  m.def("policy_names", &policy_names);
  m.def("op_list", &op_list, py::arg("name"));
  m.def("set_policy", &set_policy, py::arg("device"), py::arg("op"), py::arg("policy"));
  m.def("policies", &policies, py::arg("device"));
  m.def("uninstall", &uninstall);
}

}  // namespace amp_mp::casting
