#include "torch/casting/autocast.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/StringUtil.h>
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>

#include "torch/casting/autocast_kernel.h"
#include "torch/casting/op_lists.h"

namespace amp_mp::casting {
namespace {

using c10::DispatchKey;

// Never destroyed: when the process ends, threads may still be in a kernel, and the dispatcher may
// be destroyed already.
using Entries = std::map<std::pair<std::string, std::string>, std::unique_ptr<Entry>>;
std::mutex& mutex = *new std::mutex;
Entries& entries = *new Entries;  // by device and operator
std::vector<std::unique_ptr<torch::Library>>& registrations =
    *new std::vector<std::unique_ptr<torch::Library>>;

DispatchKey key_of(const std::string& device) {
  TORCH_CHECK_VALUE(device == "cpu" || device == "cuda",
                    "device must be \"cpu\" or \"cuda\", found \"", device, '"');
  return device == "cpu" ? DispatchKey::AutocastCPU : DispatchKey::AutocastCUDA;
}

// Null if the running torch has no such operator.
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
    entry->in_place = entry->in_place || (written && !argument.is_out());
  }
  entry->operands = operands_of(op->schema());
  // Silences torch's warning that a kernel is overridden, which is intended here.
  struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, base.substr(0, colons),
                                                  entry->key, __FILE__, __LINE__);
  library->impl(name.substr(colons + 2).c_str(), kernel_of(entry.get(), *op));
  registrations.push_back(std::move(library));
  return entries.emplace(std::pair(device, name), std::move(entry)).first->second.get();
}

}  // namespace

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

const std::vector<std::string>& policy_names() {
  static const std::vector<std::string> names = {
      "stock",  "unchanged",     "low_precision",         "float32", "widest", "set_output_dtype",
      "banned", "bfloat16_only", "low_precision_if_large"};
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
  const auto wanted = OpPolicy(found - names.begin());
  return names[size_t(entry->policy.exchange(wanted))];
}

std::map<std::string, std::string> policies(const std::string& device) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::map<std::string, std::string> found;
  for (const auto& [key, entry] : entries)
    if (key.first == device) found[key.second] = policy_names()[size_t(entry->policy.load())];
  return found;
}

void uninstall() {
  const std::lock_guard<std::mutex> lock(mutex);
  registrations.clear();
  for (auto& [key, entry] : entries) static_cast<void>(entry.release());  // see Entry
  entries.clear();
}

}  // namespace amp_mp::casting
