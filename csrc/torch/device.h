#pragma once
// Runs an operation on the CPU, or queues it on a CUDA device's current stream.
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "cuda/passes.h"
#include "torch/checks.h"
#include "torch/state/host_memory.h"

namespace amp_mp {

inline at::Tensor scratch(int64_t bytes, const at::Device& device) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

template <class T>
T* data_of(const at::Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

inline void* current_stream(const at::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

// That of the tensor's device; null on a CPU.
inline void* stream_of(const at::Tensor& t) {
  return t.is_cuda() ? current_stream(t.device()) : nullptr;
}

// For memory that another stream may have allocated: after it is freed, the allocator reuses it
// only when the current stream has done its present work. Costs a look-up in torch's allocator;
// nothing on a CPU. Memory of the host waits for the whole device, and that allocator does not know
// it.
inline void used_on_current_stream(at::Tensor t) {
  if (!t.defined() || !t.is_cuda() || is_on_host(t)) return;
  if (t.is_sparse()) {
    used_on_current_stream(t._indices());
    return used_on_current_stream(t._values());
  }
  t.record_stream(c10::impl::VirtualGuardImpl(t.device().type()).getStream(t.device()));
}

// Whether the device's current stream is being captured by a CUDA graph.
inline bool is_capturing(const at::Device& device) {
  if (!device.is_cuda()) return false;
  bool capturing = false;
  // On a new thread device 0 is the current one, and asking would open a context there.
  const c10::OptionalDeviceGuard guard(device);
  const char* error = cuda::is_capturing(current_stream(device), capturing);
  TORCH_CHECK(!error, "amp_mp: CUDA failed on ", device, ": ", error);
  return capturing;
}

// Raises RuntimeError where the library of kernels has none for CUDA.
inline void check_has_cuda(const at::Device& device) {
  TORCH_CHECK(cuda::is_built(), "amp_mp was built without CUDA, but a tensor is on ", device,
              "; rebuild with AMP_MP_CUDA=1 and nvcc on the PATH");
}

// Calls `on_cpu`; or `on_cuda(stream)`, which returns null or an error message, with `device` as
// the current device.
template <class Cpu, class Cuda>
void on(const at::Device& device, const Cpu& on_cpu, const Cuda& on_cuda) {
  if (device.is_cpu()) return on_cpu();
  check_has_cuda(device);
  const c10::OptionalDeviceGuard guard(device);
  const char* error = on_cuda(current_stream(device));
  TORCH_CHECK(!error, "amp_mp: CUDA refused a kernel on ", device, ": ", error);
}

// The CUDA branch of `on`.
#define AMP_MP_CUDA(call) [&]([[maybe_unused]] void* stream) { return cuda::call; }

}  // namespace amp_mp
