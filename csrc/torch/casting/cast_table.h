#pragma once
// The table behind cast_cache.h and kept_casts.h.
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "torch/device.h"
#include "torch/stamp.h"

namespace amp_mp::casting {

// How long a cached copy lives. Each kind is found only where casts of that kind are made.
enum class Life : uint8_t {
  region,     // to the end of the outermost torch.autocast region, as in torch
  iteration,  // where casts are on outside of any region: until a gradient has gone through it too
  kept,       // from step to step, where that was asked for
};

// What a cached copy belongs to. The address is only compared, never followed: the tensor may have
// been freed.
struct CastKey {
  const c10::TensorImpl* tensor;
  at::ScalarType dtype;
  Life life;
  bool operator==(const CastKey&) const = default;
};

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct CachedCast {
  WeakTensor owner;
  Stamp stamp;      // of the owner
  at::Tensor copy;  // detached
  // The same memory with autograd history. Weak, because its graph holds the leaf: a strong
  // reference would keep the leaf alive for ever. A forward pass keeps it alive while it needs it;
  // linking the copy again casts nothing.
  std::optional<WeakTensor> linked;
  // On which the copy was made. Other streams have to wait for the tensor, not for this one; they
  // take the copy only if a step has written it, together with the tensor.
  void* stream = nullptr;
  bool is_ready_with_tensor = false;
  bool written = false;  // by the current optimizer step
};

struct Hash {
  size_t operator()(const CastKey& key) const {
    return std::hash<const void*>()(key.tensor) * 31 + size_t(key.dtype) * 3 + size_t(key.life);
  }
};

struct CastTable {
  std::mutex mutex;
  std::unordered_map<CastKey, CachedCast, Hash> entries;
  // Casts that are not kept may be in the table only while `watched`: while torch's next clearing
  // will remove them. `clearings` counts those that have been.
  bool watched = false;
  uint64_t clearings = 0;
};

// Never destroyed: at the end of the process the allocators of the tensors may be gone already.
inline CastTable& the_table = *new CastTable;

// The one table, locked. Meanwhile nothing is computed and no tensor freed: either may need
// Python's lock, whose holder may be waiting for the table. What is dropped is freed after the
// table is.
class LockedCasts {
 public:
  CastTable* operator->() const { return &the_table; }

  void drop(const CastKey& key) {
    if (auto node = the_table.entries.extract(key)) dropped_.push_back(std::move(node.mapped()));
  }

  // Drops the entries for which `gone` is true.
  template <class F>
  void drop_if(const F& gone) {
    for (auto next = the_table.entries.begin(); next != the_table.entries.end();) {
      const auto each = next++;
      if (!gone(each->first, each->second)) continue;
      dropped_.push_back(std::move(the_table.entries.extract(each).mapped()));
    }
  }

 private:
  std::vector<CachedCast> dropped_;
  const std::lock_guard<std::mutex> lock_{the_table.mutex};
};

inline size_t owners_of_memory(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->unsafe_storage().use_count();
}

// Whether the cast has the tensor's present values, as far as version counter and memory tell.
inline bool is_current(const CachedCast& e, const at::Tensor& t) {
  return !e.owner.expired() && e.stamp.still(t);
}

}  // namespace amp_mp::casting
