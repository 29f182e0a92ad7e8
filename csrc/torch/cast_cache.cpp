#include "torch/cast_cache.h"

#include <ATen/CachedTensorUtils.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <mutex>
#include <optional>
#include <type_traits>
#include <unordered_map>

#include "torch/checks.h"

namespace amp_mp::casting {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// The history of a cast: gradients in the leaf's dtype. Saves nothing for backward.
struct CastBackward : Node {
  at::ScalarType dtype = at::kFloat;

  variable_list apply(variable_list&& grads) override {
    return {grads[0].defined() ? grads[0].to(dtype) : at::Tensor()};
  }
  std::string name() const override { return "AmpCastBackward"; }
};

// torch moved nodes from shared_ptr to intrusive_ptr; this is right with either.
using NodePointer = decltype(torch::autograd::Edge::function);

template <class Pointer>
Pointer make_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return Pointer(new CastBackward, [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<CastBackward>();
  }
}

// A copy that exists already, with the history of a cast from the leaf. By hand, since a custom
// autograd::Function costs five times as much, at every pass and weight.
at::Tensor link(const at::Tensor& leaf, const at::Tensor& copy) {
  NodePointer node = make_node<NodePointer>();
  node->set_next_edges(torch::autograd::collect_next_edges(leaf));
  at::Tensor linked = copy.detach();
  torch::autograd::set_history(linked, node);
  return linked;
}

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

// Never destroyed: at the end of the process tensors would outlive what they need to be freed.
std::mutex& mutex = *new std::mutex;
std::unordered_map<Key, Entry, Hash>& entries = *new std::unordered_map<Key, Entry, Hash>;

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
  at::Tensor linked = link(tensor, e.copy);
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
