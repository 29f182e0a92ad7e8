#pragma once
// Low-precision copies of float32 leaf tensors, so that a weight is cast once and not at every use.
//
// A copy is kept across autocast regions, keyed by (tensor, dtype), and used again while the
// tensor's version counter and memory are the same. Some writes do not advance the counter:
// - torch's fused optimizers. So after every optimizer step only copies are kept that the step has
//   written itself.
// - FSDP2, which gathers into memory that it shares with the parameter, and writes through another
//   tensor of the same memory (`.data`). So memory with a second owner is never cached.
// - updates through `.data` in a training loop. They are noticed if the loop drops the gradient
//   afterwards; otherwise users have to call clear().
#include "torch/checks.h"

namespace amp_mp::casting {

// The tensor in another dtype, with autograd history. `*cached`: whether it came from the cache.
at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype, bool* cached = nullptr);

// The cached copies that an optimizer step should write together with `tensors`, so that the next
// forward need not cast. Undefined if there is none, or if its memory has a second owner, such as a
// graph whose backward has not run yet and must not see new weights.
Tensors copies_to_write(const Tensors& tensors);

// Call after a step: these copies have their tensors' new values, and optimizer_stepped() keeps
// them.
void copies_written(const Tensors& tensors, const Tensors& copies);

// Casts these tensors at every use from now on, because replays of a CUDA graph change them without
// advancing version counters. During capture nothing is cached anyway.
void never_cache(const Tensors& tensors);

// Call after any optimizer step: drops the copies that the step did not write.
void optimizer_stepped();

// Drops every copy.
void clear();

// Tensors and their copies, without tensors that have been freed.
std::vector<std::pair<at::Tensor, at::Tensor>> cached();

}  // namespace amp_mp::casting
