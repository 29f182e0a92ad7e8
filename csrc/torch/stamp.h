#pragma once
// Whether a tensor was written after the stamp was made. Writes through `.data`, NumPy and DLPack
// advance no version counter, and a stamp does not see them.
#include <ATen/core/Tensor.h>

namespace amp_mp {

// By its version counter, wherever the tensor's memory is now (`p.data = ...`, as Module.to does).
struct VersionStamp {
  int64_t version = -1;

  VersionStamp() = default;
  explicit VersionStamp(const at::Tensor& t) : version(t._version()) {}

  bool still(const at::Tensor& t) const { return version == t._version(); }
  // For a tensor that Module.to may have replaced by one whose counter begins anew.
  bool not_advanced(const at::Tensor& t) const { return version >= t._version(); }
};

// By its version counter and by where its memory is.
struct Stamp {
  VersionStamp written;
  const void* memory = nullptr;

  Stamp() = default;
  explicit Stamp(const at::Tensor& t) : written(t), memory(memory_of(t)) {}

  bool still(const at::Tensor& t) const { return written.still(t) && memory == memory_of(t); }

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
