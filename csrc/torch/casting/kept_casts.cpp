#include "torch/casting/kept_casts.h"

#include <atomic>
#include <unordered_map>
#include <utility>

#include "torch/casting/cast_table.h"

namespace amp_mp::casting {
namespace {

thread_local bool keeps = false;

// By address, with a reference to the tensor's version counter, which tells whether the tensor
// lives: another tensor may get the address of a freed one. A weak reference to the tensor itself
// would stand in the way of torch.utils.swap_tensors. Guarded by the table's lock; the usual case,
// that there is none, needs no lock.
using Refused = std::unordered_map<const c10::TensorImpl*, c10::VariableVersion>;
Refused& refused = *new Refused;
std::atomic<bool> some_refused = false;

bool is_refused(const c10::TensorImpl* tensor) {
  const auto found = refused.find(tensor);
  return found != refused.end() && !found->second.unique();
}

}  // namespace

bool keeps_casts() { return keeps; }

bool set_keeps_casts(bool keep) { return std::exchange(keeps, keep); }

Tensors copies_to_write(const Tensors& tensors) {
  Tensors copies(tensors.size());
  const LockedCasts table;
  if (table->entries.empty()) return copies;
  for (size_t i = 0; i < tensors.size(); ++i)
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      const auto found = table->entries.find({tensors[i].unsafeGetTensorImpl(), dtype, Life::kept});
      if (found == table->entries.end()) continue;
      const CachedCast& e = found->second;
      if (is_current(e, tensors[i]) && owners_of_memory(e.copy) == 1 &&
          same_layout(e.copy, tensors[i]))
        copies[i] = e.copy;
    }
  return copies;
}

void copies_written(const Tensors& tensors, const Tensors& copies) {
  Tensors of_other_streams;
  {
    const LockedCasts table;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!copies[i].defined()) continue;
      bump_version(copies[i]);
      const auto found = table->entries.find(
          {tensors[i].unsafeGetTensorImpl(), copies[i].scalar_type(), Life::kept});
      if (found == table->entries.end() || !found->second.copy.is_same(copies[i])) continue;
      CachedCast& e = found->second;
      e.stamp = Stamp(tensors[i]);
      e.written = e.is_ready_with_tensor = true;
      if (e.stream != stream_of(tensors[i])) of_other_streams.push_back(copies[i]);
    }
  }
  for (const at::Tensor& copy : of_other_streams) used_on_current_stream(copy);
}

void optimizer_stepped() {
  LockedCasts().drop_if(
      [](const CastKey&, CachedCast& e) { return !std::exchange(e.written, false); });
}

void never_cache(const Tensors& tensors) {
  LockedCasts table;
  std::erase_if(refused, [](const auto& each) { return each.second.unique(); });
  for (const at::Tensor& t : tensors)
    refused.insert_or_assign(t.unsafeGetTensorImpl(), t.unsafeGetTensorImpl()->version_counter());
  some_refused = true;
  table.drop_if([](const CastKey& key, const CachedCast&) { return is_refused(key.tensor); });
}

bool is_never_cached(const at::Tensor& tensor) {
  if (!some_refused) return false;
  const LockedCasts table;
  return is_refused(tensor.unsafeGetTensorImpl());
}

}  // namespace amp_mp::casting
