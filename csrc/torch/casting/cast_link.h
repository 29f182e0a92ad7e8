#pragma once
// Autograd history for cached casts.
#include <ATen/core/Tensor.h>

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

// `copy` as if it had just been cast from `leaf`: same memory, but gradients go to the leaf, in
// float32.
at::Tensor link(const CastKey& key, const at::Tensor& leaf, const at::Tensor& copy);

// Called in backward when a gradient goes through a linked copy. Defined in cast_cache.cpp.
void gradient_went_through(const CastKey& key);

}  // namespace amp_mp::casting
