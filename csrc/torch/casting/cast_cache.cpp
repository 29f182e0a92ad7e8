#include "torch/casting/cast_cache.h"

#include <ATen/CachedTensorUtils.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <type_traits>
#include <unordered_map>

#include "torch/device.h"

namespace amp_mp::casting {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;
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
  bool differentiated = false;  // a gradient came this way
  bool written = false;         // by the optimizer's step that is under way
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

using Entries = std::unordered_map<Key, Entry, Hash>;

// Never destroyed: at the end of the process tensors would outlive what they need to be freed.
// While the lock is held nothing is computed and no tensor freed: either may need Python's lock,
// whose holder may be waiting for this one.
std::mutex& mutex = *new std::mutex;
Entries& entries = *new Entries;
// Tensors that are never cached, and whether there are any.
using Refused = std::unordered_map<const c10::TensorImpl*, Owner>;
Refused& refused = *new Refused;
std::atomic<bool> some_refused = false;

// The history of a cast: gradients in the leaf's dtype. Saves nothing for backward.
struct CastBackward : Node {
  explicit CastBackward(const Key& k) : key(k) {}
  Key key;  // not followed: the leaf may be gone

  variable_list apply(variable_list&& grads) override {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      const auto found = entries.find(key);
      if (found != entries.end()) found->second.differentiated = true;
    }
    return {grads[0].defined() ? grads[0].to(at::kFloat) : at::Tensor()};
  }
  std::string name() const override { return "AmpCastBackward"; }
};

// torch moved nodes from shared_ptr to intrusive_ptr; this is right with either.
using NodePointer = decltype(torch::autograd::Edge::function);

template <class Pointer>
Pointer make_node(const Key& key) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return Pointer(new CastBackward(key), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<CastBackward>(key);
  }
}

// A copy that exists already, with the history of a cast from the leaf. By hand, since a custom
// autograd::Function costs five times as much, at every pass and weight.
at::Tensor link(const at::Tensor& leaf, const at::Tensor& copy) {
  NodePointer node = make_node<NodePointer>({leaf.unsafeGetTensorImpl(), copy.scalar_type()});
  node->set_next_edges(torch::autograd::collect_next_edges(leaf));
  at::Tensor linked = copy.detach();
  torch::autograd::set_history(linked, node);
  return linked;
}

size_t owners_of_memory(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->unsafe_storage().use_count();
}

bool is_cacheable(const at::Tensor& t, at::ScalarType dtype) {
  return t.requires_grad() && t.is_leaf() && t.scalar_type() == at::kFloat &&
         (dtype == at::kHalf || dtype == at::kBFloat16) && !t.is_view() && !t.is_inference() &&
         at::autocast::is_autocast_cache_enabled() && !c10::InferenceMode::is_enabled() &&
         !is_subclass(t) && owners_of_memory(t) == 1 && !at::caching::is_cached_tensor(t);
}

bool is_refused(const at::Tensor& t) {
  if (!some_refused) return false;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = refused.find(t.unsafeGetTensorImpl());
  return found != refused.end() && !found->second.expired();
}

// A gradient that came and has been dropped was used by somebody, maybe through `.data`.
bool is_current(const Entry& e, const at::Tensor& t) {
  return !e.owner.expired() && e.version == t._version() && e.memory == t.const_data_ptr() &&
         !(e.differentiated && !t.grad().defined());
}

// Moves entries out that `gone` says, for the caller to free without the lock.
template <class F>
std::vector<Entry> take_if(const F& gone) {
  std::vector<Entry> taken;
  for (auto place = entries.begin(); place != entries.end();)
    if (gone(place->first, place->second)) {
      taken.push_back(std::move(place->second));
      place = entries.erase(place);
    } else {
      ++place;
    }
  return taken;
}

// The copy that is current, with history if asked for; undefined if there is none.
at::Tensor find(const at::Tensor& tensor, const Key& key, bool with_grad) {
  at::Tensor copy;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = entries.find(key);
    if (found == entries.end() || !is_current(found->second, tensor)) return {};
    const Entry& e = found->second;
    if (with_grad && e.linked)
      if (auto alive = e.linked->lock()) return at::Tensor(std::move(alive));
    copy = e.copy;
  }
  if (!with_grad) return copy;
  at::Tensor linked = link(tensor, copy);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = entries.find(key);
  if (found != entries.end() && found->second.copy.is_same(copy))
    found->second.linked = Owner(linked.getIntrusivePtr());
  return linked;
}

}  // namespace

at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype, bool* cached) {
  if (tensor.scalar_type() == dtype) return tensor;
  // A copy that a CUDA graph reads or makes belongs to the graph.
  if (!is_cacheable(tensor, dtype) || is_capturing(tensor.device()) || is_refused(tensor))
    return tensor.to(dtype);
  const bool with_grad = at::GradMode::is_enabled();
  const Key key{tensor.unsafeGetTensorImpl(), dtype};
  if (at::Tensor found = find(tensor, key, with_grad); found.defined()) {
    if (cached) *cached = true;
    return found;
  }
  Entry entry{Owner(tensor.getIntrusivePtr()), tensor._version(), tensor.const_data_ptr(), {}, {}};
  entry.copy = tensor.detach().to(dtype);
  at::Tensor result = with_grad ? link(tensor, entry.copy) : entry.copy;
  if (with_grad) entry.linked = Owner(result.getIntrusivePtr());
  std::vector<Entry> old;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    // Tensors that are gone are forgotten whenever the table would have to grow.
    if (entries.size() == entries.bucket_count())
      old = take_if([](const Key&, const Entry& e) { return e.owner.expired(); });
    const auto [place, is_new] = entries.try_emplace(key, std::move(entry));
    if (!is_new) old.push_back(std::exchange(place->second, std::move(entry)));
  }
  return result;
}

Tensors copies_to_write(const Tensors& tensors) {
  Tensors copies(tensors.size());
  const std::lock_guard<std::mutex> lock(mutex);
  if (entries.empty()) return copies;
  for (size_t i = 0; i < tensors.size(); ++i)
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      const auto found = entries.find({tensors[i].unsafeGetTensorImpl(), dtype});
      if (found == entries.end()) continue;
      const Entry& e = found->second;
      if (is_current(e, tensors[i]) && owners_of_memory(e.copy) == 1 &&
          same_layout(e.copy, tensors[i]))
        copies[i] = e.copy;
    }
  return copies;
}

void copies_written(const Tensors& tensors, const Tensors& copies) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!copies[i].defined()) continue;
    bump_version(copies[i]);
    const auto found = entries.find({tensors[i].unsafeGetTensorImpl(), copies[i].scalar_type()});
    if (found == entries.end() || !found->second.copy.is_same(copies[i])) continue;
    Entry& e = found->second;
    e.version = tensors[i]._version();
    e.memory = tensors[i].const_data_ptr();
    e.differentiated = false;
    e.written = true;
  }
}

void never_cache(const Tensors& tensors) {
  std::vector<Entry> old;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const at::Tensor& t : tensors)
    refused.insert_or_assign(t.unsafeGetTensorImpl(), Owner(t.getIntrusivePtr()));
  some_refused = true;
  old = take_if([](const Key& key, const Entry&) { return refused.contains(key.tensor); });
}

void optimizer_stepped() {
  std::vector<Entry> old;
  const std::lock_guard<std::mutex> lock(mutex);
  old = take_if([](const Key&, const Entry& e) { return !e.written; });
  for (auto& [key, entry] : entries) entry.written = false;
}

void clear() {
  Entries old;
  const std::lock_guard<std::mutex> lock(mutex);
  old.swap(entries);
}

std::vector<std::pair<at::Tensor, at::Tensor>> cached() {
  std::vector<std::pair<at::Tensor, at::Tensor>> found;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& [key, entry] : entries)
    if (auto alive = entry.owner.lock())
      found.emplace_back(at::Tensor(std::move(alive)), entry.copy);
  return found;
}

}  // namespace amp_mp::casting
