#include "torch/cast_cache.h"

#include <ATen/CachedTensorUtils.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <mutex>
#include <optional>
#include <unordered_map>

#include "torch/checks.h"

namespace amp_mp::casting {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Gives a copy that exists already the history of a cast. Saves nothing for backward, so that one
// node serves iteration after iteration.
struct Link : torch::autograd::Function<Link> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& leaf,
                            const at::Tensor& copy) {
    context->saved_data["dtype"] = int64_t(leaf.scalar_type());
    return copy.alias();
  }
  static variable_list backward(AutogradContext* context, variable_list grads) {
    const auto dtype = at::ScalarType(context->saved_data["dtype"].toInt());
    return {grads[0].defined() ? grads[0].to(dtype) : at::Tensor(), at::Tensor()};
  }
};

using Owner = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Entry {
  Owner owner;
  int64_t version;
  const void* memory;
  at::Tensor copy;  // detached
  // The same memory with history. Weak: its graph holds the leaf, and an owner could never expire.
  // What a forward pass saves keeps it alive for the rest of the pass; making it anew casts
  // nothing.
  std::optional<Owner> linked;
};

struct Key {
  const c10::TensorImpl* tensor;
  at::ScalarType dtype;
  bool operator==(const Key&) const = default;
};

struct Hash {
  size_t operator()(const Key& key) const {
    return std::hash<const void*>()(key.tensor) * 31 + size_t(key.dtype);
  }
};

std::mutex mutex;
std::unordered_map<Key, Entry, Hash> entries;

bool is_cacheable(const at::Tensor& t, at::ScalarType dtype) {
  return t.requires_grad() && t.is_leaf() && t.scalar_type() == at::kFloat &&
         (dtype == at::kHalf || dtype == at::kBFloat16) && !t.is_view() && !t.is_inference() &&
         at::autocast::is_autocast_cache_enabled() && !c10::InferenceMode::is_enabled() &&
         !is_subclass(t) && !at::caching::is_cached_tensor(t);
}

bool is_current(const Entry& e, const at::Tensor& t) {
  return !e.owner.expired() && e.version == t._version() && e.memory == t.const_data_ptr();
}

// Forgets tensors that are gone, whenever the table would have to grow.
void sweep() {
  std::erase_if(entries, [](const auto& e) { return e.second.owner.expired(); });
}

}  // namespace

at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype) {
  if (tensor.scalar_type() == dtype) return tensor;
  if (!is_cacheable(tensor, dtype)) return tensor.to(dtype);
  const bool with_grad = at::GradMode::is_enabled();
  const std::lock_guard<std::mutex> lock(mutex);
  const Key key{tensor.unsafeGetTensorImpl(), dtype};
  auto found = entries.find(key);
  if (found == entries.end() || !is_current(found->second, tensor)) {
    if (found == entries.end() && entries.size() == entries.bucket_count()) sweep();
    const at::Tensor detached = tensor.detach();
    Entry entry{Owner(tensor.getIntrusivePtr()),
                tensor._version(),
                tensor.const_data_ptr(),
                detached.to(dtype),
                {}};
    found = entries.insert_or_assign(key, std::move(entry)).first;
  }
  Entry& e = found->second;
  if (!with_grad) return e.copy;
  if (e.linked)
    if (auto alive = e.linked->lock()) return at::Tensor(std::move(alive));
  at::Tensor linked = Link::apply(tensor, e.copy);
  e.linked = Owner(linked.getIntrusivePtr());
  return linked;
}

void clear() {
  const std::lock_guard<std::mutex> lock(mutex);
  entries.clear();
}

int64_t cached_count() {
  const std::lock_guard<std::mutex> lock(mutex);
  return int64_t(entries.size());
}

}  // namespace amp_mp::casting
