#include "torch/casting/torch_cache.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace amp_mp::casting {

// torch has no hook for this. So a tensor of one element is put into torch's cache, through the
// cast that torch would make of a weight: the cast is held by the cache alone, its history holds
// the tensor, and the tensor's memory has a deleter, which runs when torch drops the cast.
void on_torch_clearing(void (*cleared)()) {
  using enum c10::DispatchKey;
  // The cast is not an operation of the user's: modes, transforms and traces do not see it.
  const c10::impl::ExcludeDispatchKeyGuard unseen(
      c10::DispatchKeySet{Python, PythonTLSSnapshot, Tracer, FuncTorchDynamicLayerFrontMode,
                          FuncTorchDynamicLayerBackMode} |
      c10::autocast_dispatch_keyset);
  const at::AutoGradMode with_history(true);
  static float memory = 0;
  const auto deleter = [cleared](void*) { cleared(); };
  const at::Tensor token = at::from_blob(&memory, {1}, deleter, at::kFloat).set_requires_grad(true);
  at::autocast::cached_cast(at::autocast::get_autocast_dtype(at::kCPU), token, at::kCPU);
}

int open_regions() {
  const int with_one_more = at::autocast::increment_nesting();
  at::autocast::decrement_nesting();
  return with_one_more - 1;
}

}  // namespace amp_mp::casting
