#pragma once
// Whether a tensor was written since one looked: its version counter, and where its memory lies.
// Writes through `.data`, NumPy and DLPack advance no counter.
#include <ATen/core/Tensor.h>

namespace amp_mp {

struct Stamp {
  int64_t version = -1;
  const void* memory = nullptr;

  Stamp() = default;
  explicit Stamp(const at::Tensor& t) : version(t._version()), memory(memory_of(t)) {}

  bool still(const at::Tensor& t) const { return same_version(t) && memory == memory_of(t); }
  // As still, for a tensor that may be moved by `p.data = ...`, as Module.to does.
  bool same_version(const at::Tensor& t) const { return version == t._version(); }
  // As same_version, for a tensor that Module.to may replace by one whose counter begins anew.
  bool not_advanced(const at::Tensor& t) const { return version >= t._version(); }

 private:
  static const void* memory_of(const at::Tensor& t) {
    if (!t.has_storage()) return nullptr;  // sparse; a DTensor's storage has no memory
    return static_cast<const char*>(t.unsafeGetTensorImpl()
                                        ->unsafe_storage()
                                        .unsafeGetStorageImpl()
                                        ->_mutable_data_ptr_no_checks()
                                        .get()) +
           t.storage_offset();
  }
};

}  // namespace amp_mp
