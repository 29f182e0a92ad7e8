// What every backend of torch has to have itself: making tensors, moving them, looking at them from
// other sides. Everything that computes is left to the fallback.
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "aliases.h"
#include "current_stream.h"
#include "ledger.h"
#include "memory.h"

namespace pretend_gpu {
namespace {

using at::IntArrayRef;
using at::Tensor;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

c10::ScalarType type_or_default(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(at::get_default_dtype_as_scalartype());
}

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, allocator(), kKeys, type_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device,
                     std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, allocator(), kKeys,
                                           type_or_default(dtype));
}

// Zeros without memory, which forward-mode derivatives are full of.
Tensor zeros_without_memory(IntArrayRef size, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<at::Device> device,
                            std::optional<bool>) {
  at::native::ZeroTensorAllocator nothing(device.value_or(at::Device(at::kCUDA, 0)));
  const c10::DispatchKeySet keys = kKeys.add(c10::DispatchKey::ZeroTensor);
  return at::detail::empty_generic(size, &nothing, keys, type_or_default(dtype), {});
}

void copy_on_the_cpu(const Tensor& to, const Tensor& from) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  to.copy_(from);
}

// Between the devices nothing waits; to and from the host's memory the caller waits unless told
// otherwise, and the driver does so where the host's memory is not pinned.
Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.numel() == 0) return to;
  const bool down = !to.is_cuda(), up = !from.is_cuda();
  if (down || up) {
    const bool waits = !non_blocking || !(down ? to : from).is_pinned();
    const char* name = down ? "copy_ to the host" : "copy_ to the device";
    waits ? note_sync(name) : refuse_during_capture(name);
  }
  if (!cuda_on_cpu::under_way()) note_operator("aten::copy_");
  const bool is_late =
      cuda_on_cpu::is_delayed() && !cuda_on_cpu::under_way() && to.device() == from.device();
  if (!is_late && to.is_cuda()) settle(to.device());
  if (!is_late && from.is_cuda()) settle(from.device());
  Aliases aliases;
  const auto on_host = [&](const Tensor& t) { return t.is_cuda() ? aliases.of(t) : t; };
  const Tensor host_to = on_host(to), host_from = on_host(from);
  if (cuda_on_cpu::Recording* recording = cuda_on_cpu::under_way()) {
    TORCH_CHECK(!down && !up, "pretend GPU: a capture takes no copy from or to the host");
    recording->add([=] { copy_on_the_cpu(host_to, host_from); });
  } else if (is_late) {
    cuda_on_cpu::queue(current_stream(to.device().index()),
                       [=] { copy_on_the_cpu(host_to, host_from); });
  } else {
    copy_on_the_cpu(host_to, host_from);
  }
  return to;
}

at::Scalar local_scalar_dense(const Tensor& t) {
  note_sync("aten::_local_scalar_dense");
  settle(t.device());
  return at::_local_scalar_dense(Aliases().of(t));
}

void grow(const Tensor& t, size_t bytes) {
  c10::StorageImpl* storage = t.storage().unsafeGetStorageImpl();
  if (bytes <= storage->nbytes()) return;
  const c10::DeviceGuard guard(t.device());
  c10::DataPtr larger = allocator()->allocate(bytes);
  if (storage->nbytes() > 0) {
    note_operator("memcpy");
    settle(t.device());
    memcpy(larger.get(), storage->data(), storage->nbytes());
  }
  storage->set_data_ptr_noswap(std::move(larger));
  storage->set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& self, IntArrayRef size,
                      std::optional<at::MemoryFormat> format) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() != size) impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  grow(self, at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), self.itemsize(),
                                              impl->storage_offset()));
  return self;
}

Tensor& set_strided(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size,
                    IntArrayRef stride) {
  at::native::checkSetStorage(self, source, offset, size, stride);
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  if (stride.data()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  grow(self,
       at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), self.itemsize(), offset));
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto size = int64_t(source.nbytes() / self.itemsize());
  return set_strided(self, std::move(source), 0, {size}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_strided(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

Tensor& set_nothing(Tensor& self) {
  return set_strided(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator(), true), 0,
                     {0}, {1});
}

void record_stream(Tensor& t, at::Stream stream) {
  also_used_on(t.storage().data(), id_of(stream));
}

// On a GPU these take half precision in and give float32 out; on a CPU they do not.
Tensor softmax(const Tensor& self, int64_t dim, bool half_to_float) {
  const Tensor x = half_to_float ? self.to(at::kFloat) : self;
  Tensor out = at::empty_like(x, at::MemoryFormat::Contiguous);
  return at::_softmax_out(out, x, dim, false);
}
Tensor log_softmax(const Tensor& self, int64_t dim, bool half_to_float) {
  const Tensor x = half_to_float ? self.to(at::kFloat) : self;
  Tensor out = at::empty_like(x, at::MemoryFormat::Contiguous);
  return at::_log_softmax_out(out, x, dim, false);
}
Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim,
                        at::ScalarType input) {
  Tensor out = at::empty_like(grad, at::MemoryFormat::Contiguous);
  return at::_softmax_backward_data_out(out, grad, output, dim, grad.scalar_type()).to(input);
}
Tensor log_softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim,
                            at::ScalarType input) {
  Tensor out = at::empty_like(grad, at::MemoryFormat::Contiguous);
  return at::_log_softmax_backward_data_out(out, grad, output, dim, grad.scalar_type()).to(input);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", zeros_without_memory);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize_);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("set_", set_nothing);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_strided);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_softmax", softmax);
  m.impl("_log_softmax", log_softmax);
  m.impl("_softmax_backward_data", softmax_backward);
  m.impl("_log_softmax_backward_data", log_softmax_backward);
}

}  // namespace
}  // namespace pretend_gpu
