#pragma once
// Casts that are kept from step to step, for scripts that promise not to write weights through
// `.data`. Our optimizers write them beside the weights, so that a training step casts no weight.
//
// torch's fused optimizers advance no version counter. So after every optimizer step only copies
// are kept that the step has written itself.
#include "torch/checks.h"

namespace amp_mp::casting {

// Whether casts that this thread makes are kept.
bool keeps_casts();
bool set_keeps_casts(bool keep);  // returns what was set before

// The kept copies that an optimizer step should write together with `tensors`. Undefined if there
// is none, or if its memory has a second owner, such as a graph whose backward has not run yet and
// must not see new weights.
Tensors copies_to_write(const Tensors& tensors);

// Call after a step: these copies have their tensors' new values, and optimizer_stepped() keeps
// them.
void copies_written(const Tensors& tensors, const Tensors& copies);

// Call after any optimizer step: drops the copies that the step did not write.
void optimizer_stepped();

// Casts these tensors at every use from now on, because replays of a CUDA graph change them without
// advancing version counters.
void never_cache(const Tensors& tensors);
bool is_never_cached(const at::Tensor& tensor);

}  // namespace amp_mp::casting
