#include "torch/casting/cast_cache.h"

#include <ATen/CachedTensorUtils.h>
#include <ATen/autocast_mode.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "torch/casting/cast_link.h"
#include "torch/device.h"

namespace amp_mp::casting {
namespace {

using Owner = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Entry {
  Owner owner;
  int64_t version;
  const void* memory;
  at::Tensor copy;  // detached
  // The same memory with autograd history. Weak, because its graph holds the leaf: a strong
  // reference would keep the leaf alive for ever. A forward pass keeps it alive while it needs it;
  // linking the copy again casts nothing.
  std::optional<Owner> linked;
  bool differentiated = false;  // a gradient has gone through `linked`
  bool written = false;         // by the current optimizer step
};

struct Hash {
  size_t operator()(const CastKey& key) const {
    return std::hash<const void*>()(key.tensor) * 31 + size_t(key.dtype);
  }
};

using Entries = std::unordered_map<CastKey, Entry, Hash>;

// Never destroyed: at the end of the process the allocators of the tensors may be gone already.
// While the mutex is held nothing is computed and no tensor freed: either may need Python's lock,
// whose holder may be waiting for the mutex.
std::mutex& mutex = *new std::mutex;
Entries& entries = *new Entries;
// Tensors that are never cached, and whether there are any: the usual case needs no lock.
using Refused = std::unordered_map<const c10::TensorImpl*, Owner>;
Refused& refused = *new Refused;
std::atomic<bool> some_refused = false;

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

// A gradient that was there and is gone may have been used by an update through `.data`, which
// advances no version counter.
bool is_current(const Entry& e, const at::Tensor& t) {
  return !e.owner.expired() && e.version == t._version() && e.memory == t.const_data_ptr() &&
         !(e.differentiated && !t.grad().defined());
}

// Removes the entries for which `gone` is true and returns them, so that the caller can free them
// after it has released the mutex.
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

// The current copy, with autograd history if with_grad; undefined if there is none.
at::Tensor find(const at::Tensor& tensor, const CastKey& key, bool with_grad) {
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

void mark_differentiated(const CastKey& key) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = entries.find(key);
  if (found != entries.end()) found->second.differentiated = true;
}

at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype, bool* cached) {
  if (tensor.scalar_type() == dtype) return tensor;
  // During capture a copy's memory belongs to the CUDA graph, and must not be cached.
  if (!is_cacheable(tensor, dtype) || is_capturing(tensor.device()) || is_refused(tensor))
    return tensor.to(dtype);
  const bool with_grad = at::GradMode::is_enabled();
  const CastKey key{tensor.unsafeGetTensorImpl(), dtype};
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
    // Entries of freed tensors are removed whenever the table would have to grow.
    if (entries.size() == entries.bucket_count())
      old = take_if([](const CastKey&, const Entry& e) { return e.owner.expired(); });
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
  old = take_if([](const CastKey& key, const Entry&) { return refused.contains(key.tensor); });
}

void optimizer_stepped() {
  std::vector<Entry> old;
  const std::lock_guard<std::mutex> lock(mutex);
  old = take_if([](const CastKey&, const Entry& e) { return !e.written; });
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
