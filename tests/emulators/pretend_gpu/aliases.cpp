#include "aliases.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>

#include "current_stream.h"
#include "memory.h"

namespace pretend_gpu {
namespace {

at::Tensor tensor_over(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                    like.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                 like.storage_offset());
  return t;
}

}  // namespace

c10::Storage Aliases::storage_of(const at::Tensor& t) {
  const c10::Storage& own = t.storage();
  for (const auto& [known, alias] : storages_)
    if (known == own.unsafeGetStorageImpl()) return alias;
  const c10::Storage alias(c10::Storage::use_byte_size_t(), own.nbytes(),
                           c10::DataPtr(const_cast<void*>(own.data()), at::kCPU),
                           c10::GetCPUAllocator(), true);
  storages_.emplace_back(own.unsafeGetStorageImpl(), alias);
  return alias;
}

at::Tensor Aliases::of(const at::Tensor& t) {
  for (const Pair& pair : pairs_)
    if (pair.original.is_same(t)) return pair.alias;
  pairs_.push_back({t, tensor_over(storage_of(t), c10::DispatchKey::CPU, t)});
  if (t.unsafeGetTensorImpl()->is_wrapped_number())
    pairs_.back().alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  return pairs_.back().alias;
}

bool Aliases::contain(const at::Tensor& result) const {
  return std::any_of(pairs_.begin(), pairs_.end(), [&](const Pair& pair) {
    return result.storage().is_alias_of(pair.alias.storage());
  });
}

at::Tensor Aliases::back(const at::Tensor& result, at::Device device) const {
  if (!result.defined()) return result;
  for (const Pair& pair : pairs_)
    if (pair.alias.is_same(result)) return pair.original;
  for (const Pair& pair : pairs_)
    if (result.storage().is_alias_of(pair.alias.storage()))
      return tensor_over(pair.original.storage(), c10::DispatchKey::CUDA, result);
  const c10::DeviceGuard guard(device);
  const size_t bytes = result.storage().nbytes();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, allocator()->allocate(bytes),
                       allocator(), true);
  settle(device);  // the memory may have been another's until now
  if (bytes > 0) memcpy(storage.mutable_data(), result.storage().data(), bytes);
  return tensor_over(std::move(storage), c10::DispatchKey::CUDA, result);
}

void Aliases::write_back() const {
  for (const auto& [original, alias] : pairs_) {
    const bool moved = alias.storage().data() != original.storage().data();
    c10::TensorImpl* impl = original.unsafeGetTensorImpl();
    if (moved) {
      c10::StorageImpl* storage = original.storage().unsafeGetStorageImpl();
      storage->set_data_ptr_noswap(allocator()->allocate(alias.storage().nbytes()));
      storage->set_nbytes(alias.storage().nbytes());
      settle(original.device());
      if (storage->nbytes() > 0)
        memcpy(storage->mutable_data(), alias.storage().data(), storage->nbytes());
    }
    if (moved || alias.sizes() != original.sizes() || alias.strides() != original.strides())
      impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
  }
}

}  // namespace pretend_gpu
