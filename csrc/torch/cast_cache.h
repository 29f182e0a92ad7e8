#pragma once
// Low-precision copies of float32 leaf tensors, so that a weight is cast once and not at every use.
//
// A copy is kept across autocast regions, keyed by (tensor, dtype), and used again while the
// tensor's version counter and memory are the same. Two things change weights without the counter:
// torch's fused optimizers, so every optimizer step drops all copies (clear), and writes through
// `.data`, after which users call it.
#include <ATen/core/Tensor.h>

namespace amp_mp::casting {

// The tensor in another dtype, with its autograd history; from the cache where that is right.
at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype);

// Drops every copy.
void clear();
int64_t cached_count();

}  // namespace amp_mp::casting
