#include "torch/casting/cast_cache.h"

#include <ATen/CachedTensorUtils.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "torch/casting/cast_table.h"
#include "torch/casting/kept_casts.h"
#include "torch/casting/torch_cache.h"
#include "torch/device.h"
#include "torch/torch_versions.h"

namespace amp_mp::casting {
namespace {

bool is_cacheable(const at::Tensor& t, at::ScalarType dtype) {
  // Note: Never cached (docs/design.md)
  // During capture a copy's memory belongs to the CUDA graph, and must not be cached.
  return t.requires_grad() && t.is_leaf() && t.scalar_type() == at::kFloat && is_low(dtype) &&
         !t.is_view() && !t.is_inference() && at::autocast::is_autocast_cache_enabled() &&
         !c10::InferenceMode::is_enabled() && !is_subclass(t) && owners_of_memory(t) == 1 &&
         !at::caching::is_cached_tensor(t) && !is_capturing(t.device()) && !is_never_cached(t);
}

// How long a copy made now may live; none if it must not be cached.
std::optional<Life> life_of_casts() {
  if (keeps_casts()) return Life::kept;
  if (open_regions() > 0) return Life::region;
  if (at::GradMode::is_enabled()) return Life::iteration;
  return {};
}

// Called by torch's clearing.
void drop_unkept() {
  LockedCasts table;
  ++table->clearings;
  table->watched = false;
  table.drop_if([](const CastKey& key, const CachedCast&) { return key.life != Life::kept; });
}

// The number of clearings before what is cached from now on.
uint64_t watch_clearing() {
  uint64_t clearings;
  {
    const LockedCasts table;
    clearings = table->clearings;
    if (table->watched) return clearings;
  }
  on_torch_clearing(drop_unkept);
  const LockedCasts table;
  if (table->clearings == clearings) table->watched = true;
  return clearings;
}

using torch::autograd::Node;
using torch::autograd::variable_list;

// The backward of a cast. It saves no tensor.
struct CastBackward : Node {
  explicit CastBackward(const CastKey& k) : key(k) {}
  CastKey key;

  variable_list apply(variable_list&& grads) override {
    if (key.life == Life::iteration) LockedCasts().drop(key);
    return {grads[0].defined() ? grads[0].to(at::kFloat) : at::Tensor()};
  }
  std::string name() const override { return "AmpCastBackward"; }
};

// `copy` as if it had just been cast from `leaf`: same memory, but gradients go to the leaf, in
// float32. Not by a torch::autograd::Function, which would cost five times as much, for each weight
// in each forward pass.
at::Tensor link(const CastKey& key, const at::Tensor& leaf, const at::Tensor& copy) {
  NodePointer node = make_node<CastBackward>(key);
  node->set_next_edges(torch::autograd::collect_next_edges(leaf));
  at::Tensor linked = copy.detach();
  torch::autograd::set_history(linked, node);
  return linked;
}

// The current copy, with autograd history if with_grad; undefined if there is none.
at::Tensor find(const CastKey& key, const at::Tensor& tensor, bool with_grad) {
  at::Tensor copy, linked;
  bool of_other_stream = false;
  void* const stream = stream_of(tensor);
  {
    const LockedCasts table;
    const auto found = table->entries.find(key);
    if (found == table->entries.end() || !is_current(found->second, tensor)) return {};
    const CachedCast& e = found->second;
    of_other_stream = e.stream != stream;
    if (of_other_stream && !e.is_ready_with_tensor) return {};
    if (with_grad && e.linked)
      if (auto alive = e.linked->lock()) linked = at::Tensor(std::move(alive));
    copy = e.copy;
  }
  if (of_other_stream) used_on_current_stream(copy);
  if (!with_grad) return copy;
  if (linked.defined()) return linked;
  linked = link(key, tensor, copy);
  const LockedCasts table;
  const auto found = table->entries.find(key);
  if (found != table->entries.end() && found->second.copy.is_same(copy))
    found->second.linked = WeakTensor(linked.getIntrusivePtr());
  return linked;
}

// An entry that is not inserted is freed after the table is.
void insert(const CastKey& key, CachedCast entry, uint64_t clearings) {
  LockedCasts table;
  if (key.life != Life::kept && !(table->watched && table->clearings == clearings)) return;
  // Entries of freed tensors are removed whenever the table would have to grow.
  if (table->entries.size() == table->entries.bucket_count())
    table.drop_if([](const CastKey&, const CachedCast& e) { return e.owner.expired(); });
  table.drop(key);
  table->entries.emplace(key, std::move(entry));
}

}  // namespace

at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype, bool* cached) {
  if (tensor.scalar_type() == dtype) return tensor;
  const auto life = is_cacheable(tensor, dtype) ? life_of_casts() : std::nullopt;
  if (!life) return tensor.to(dtype);
  const bool with_grad = at::GradMode::is_enabled();
  const CastKey key{tensor.unsafeGetTensorImpl(), dtype, *life};
  if (at::Tensor found = find(key, tensor, with_grad); found.defined()) {
    if (cached) *cached = true;
    return found;
  }
  const uint64_t clearings = *life == Life::kept ? 0 : watch_clearing();
  CachedCast entry{WeakTensor(tensor.getIntrusivePtr()),
                   Stamp(tensor),
                   tensor.detach().to(dtype),
                   {},
                   stream_of(tensor)};
  at::Tensor result = with_grad ? link(key, tensor, entry.copy) : entry.copy;
  if (with_grad) entry.linked = WeakTensor(result.getIntrusivePtr());
  insert(key, std::move(entry), clearings);
  return result;
}

void clear() {
  LockedCasts().drop_if([](const CastKey&, const CachedCast&) { return true; });
}

std::vector<std::pair<at::Tensor, at::Tensor>> cached() {
  std::vector<std::pair<at::Tensor, at::Tensor>> found;
  const LockedCasts table;
  for (const auto& [key, entry] : table->entries)
    if (auto alive = entry.owner.lock())
      found.emplace_back(at::Tensor(std::move(alive)), entry.copy);
  return found;
}

}  // namespace amp_mp::casting
