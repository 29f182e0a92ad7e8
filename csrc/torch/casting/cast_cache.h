#pragma once
// Low-precision copies of float32 leaf tensors, so that a weight is cast once and not at every use.
//
// A copy is kept across autocast regions, keyed by (tensor, dtype), and used again while the
// tensor's version counter and memory are the same. The counter misses some writes:
// - torch's fused optimizers do not count: after every optimizer step only copies that the step
//   wrote itself are kept.
// - FSDP2 gathers into memory that it shares with the parameter, and `.data` that somebody keeps
//   shares it too: memory with a second owner is never cached.
// - a loop of one's own that writes through `.data`: recognised where it drops the gradient it has
//   used. Otherwise users call clear().
#include "torch/checks.h"

namespace amp_mp::casting {

// The tensor in another dtype, with its autograd history; from the cache where that is right, which
// `*cached` then tells.
at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype, bool* cached = nullptr);

// Copies of `tensors` that whoever changes them should write along: then no cast is left to do.
// Undefined where there is none, or where somebody else still holds its memory, say a graph that
// has yet to go backward and must not see new weights.
Tensors copies_to_write(const Tensors& tensors);

// Those copies now have their tensors' values, also after the next optimizer_stepped().
void copies_written(const Tensors& tensors, const Tensors& copies);

// From now on these are cast at every use: a CUDA graph changes them, and counts no writes. While a
// stream is capturing nothing on its device is cached anyway.
void never_cache(const Tensors& tensors);

// Drops what the step did not write.
void optimizer_stepped();

// Drops every copy.
void clear();

// Tensors and their copies, as far as the tensors are still there.
std::vector<std::pair<at::Tensor, at::Tensor>> cached();

}  // namespace amp_mp::casting
