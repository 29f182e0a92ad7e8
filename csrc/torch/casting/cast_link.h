#pragma once
// Autograd history for cached casts.
#include <ATen/core/Tensor.h>

namespace amp_mp::casting {

// What a cached copy belongs to. The address is only compared, never followed: the tensor may have
// been freed.
struct CastKey {
  const c10::TensorImpl* tensor;
  at::ScalarType dtype;
  bool operator==(const CastKey&) const = default;
};

// `copy` as if it had just been cast from `leaf`: same memory, but gradients go to the leaf, in
// float32.
at::Tensor link(const at::Tensor& leaf, const at::Tensor& copy);

// Called in backward when a gradient goes through a linked copy. Defined in cast_cache.cpp.
void mark_differentiated(const CastKey& key);

}  // namespace amp_mp::casting
