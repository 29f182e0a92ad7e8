#include "torch/casting/kept_casts.h"

#include <atomic>
#include <unordered_set>
#include <utility>

#include "torch/casting/cast_table.h"

namespace amp_mp::casting {
namespace {

thread_local bool keeps = false;

// By address, guarded by the table's mutex. A tensor that gets the address of a freed one is cast
// at every use, which is right too. The usual case, that there is none, needs no lock.
using Addresses = std::unordered_set<const c10::TensorImpl*>;
Addresses& refused = *new Addresses;
std::atomic<bool> some_refused = false;

}  // namespace

bool keeps_casts() { return keeps; }

bool set_keeps_casts(bool keep) { return std::exchange(keeps, keep); }

Tensors copies_to_write(const Tensors& tensors) {
  CastTable& table = cast_table();
  Tensors copies(tensors.size());
  const std::lock_guard<std::mutex> lock(table.mutex);
  if (table.entries.empty()) return copies;
  for (size_t i = 0; i < tensors.size(); ++i)
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      const auto found = table.entries.find({tensors[i].unsafeGetTensorImpl(), dtype, Life::kept});
      if (found == table.entries.end()) continue;
      const CachedCast& e = found->second;
      if (is_current(e, tensors[i]) && owners_of_memory(e.copy) == 1 &&
          same_layout(e.copy, tensors[i]))
        copies[i] = e.copy;
    }
  return copies;
}

void copies_written(const Tensors& tensors, const Tensors& copies) {
  CastTable& table = cast_table();
  const std::lock_guard<std::mutex> lock(table.mutex);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!copies[i].defined()) continue;
    bump_version(copies[i]);
    const auto found =
        table.entries.find({tensors[i].unsafeGetTensorImpl(), copies[i].scalar_type(), Life::kept});
    if (found == table.entries.end() || !found->second.copy.is_same(copies[i])) continue;
    CachedCast& e = found->second;
    e.version = tensors[i]._version();
    e.memory = tensors[i].const_data_ptr();
    e.written = true;
  }
}

void optimizer_stepped() {
  CastTable& table = cast_table();
  std::vector<CachedCast> old;
  const std::lock_guard<std::mutex> lock(table.mutex);
  old = table.take_if([](const CastKey&, const CachedCast& e) { return !e.written; });
  for (auto& [key, entry] : table.entries) entry.written = false;
}

void never_cache(const Tensors& tensors) {
  CastTable& table = cast_table();
  std::vector<CachedCast> old;
  const std::lock_guard<std::mutex> lock(table.mutex);
  for (const at::Tensor& t : tensors) refused.insert(t.unsafeGetTensorImpl());
  some_refused = true;
  old = table.take_if(
      [](const CastKey& key, const CachedCast&) { return refused.contains(key.tensor); });
}

bool is_never_cached(const at::Tensor& tensor) {
  if (!some_refused) return false;
  const std::lock_guard<std::mutex> lock(cast_table().mutex);
  return refused.contains(tensor.unsafeGetTensorImpl());
}

}  // namespace amp_mp::casting
