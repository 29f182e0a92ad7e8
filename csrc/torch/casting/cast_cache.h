#pragma once
// Low-precision copies of float32 leaf tensors, so that a weight is cast once and not at every use.
//
// A copy is used again while the tensor's version counter and memory are the same. Some writes do
// not advance the counter, above all those through `.data`. So a copy lives no longer than one of
// torch's own cache:
// - made inside a torch.autocast region, until the outermost region ends;
// - made where casts are on outside of any region (amp.init), until a gradient has gone through it,
//   an optimizer has stepped, or a region has ended, such as scale_loss; and none are made where
//   gradients are off, so that evaluation sees every write.
// kept_casts.h has those that users ask to be kept longer. Memory with a second owner is never
// cached: FSDP2 writes parameters through another tensor.
// Note: Never cached (docs/design.md)
#include "torch/checks.h"

namespace amp_mp::casting {

// The tensor in another dtype, with autograd history. `*cached`: whether it came from the cache.
at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype, bool* cached = nullptr);

// Drops every copy.
void clear();

// Tensors and their copies, without tensors that have been freed.
std::vector<std::pair<at::Tensor, at::Tensor>> cached();

}  // namespace amp_mp::casting
