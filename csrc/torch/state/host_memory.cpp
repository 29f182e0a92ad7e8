#include "torch/state/host_memory.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>

#include <atomic>
#include <optional>

#include "torch/bind.h"
#include "torch/device.h"

namespace amp_mp {
namespace {

std::atomic<size_t> held = 0;  // bytes of all slabs

class HostSlab {
 public:
  HostSlab(size_t bytes, const at::Device& device, const char* what, const char* advice)
      : bytes_(bytes), device_(device) {
    const c10::OptionalDeviceGuard guard(device);
    const char* error = cuda::allocate_on_host(bytes, memory_);
    const auto gib = [](size_t n) { return double(n * 10 >> 30) / 10; };
    TORCH_CHECK(!error, "amp_mp: the host gave no pinned memory for ", what, " (", gib(bytes),
                " GiB asked, ", gib(held), " GiB held): ", error,
                ". It cannot be swapped: see the container's limit and ulimit -l, ", advice);
    held += bytes;
  }
  ~HostSlab() {
    try {
      const c10::OptionalDeviceGuard guard(device_);
      if (!is_capturing(device_) && !cuda::free_on_host(memory_)) held -= bytes_;
    } catch (const std::exception&) {  // the device is lost
    }
  }

  bool has_room(size_t bytes) const { return used_ + bytes <= bytes_; }
  void* take(size_t bytes) {
    return static_cast<char*>(memory_) + std::exchange(used_, used_ + bytes);
  }

 private:
  const size_t bytes_;
  const at::Device device_;
  void* memory_ = nullptr;
  size_t used_ = 0;
};

using Slab = std::shared_ptr<HostSlab>;
using Slabs = std::map<c10::DeviceIndex, Slab>;
thread_local Slabs room;

Slab slab_for_states(size_t bytes, const at::Device& device) {
  TORCH_CHECK(cuda::addresses_host(device.index()), device,
              " cannot address host memory; leave out offload=\"state\"");
  return std::make_shared<HostSlab>(bytes, device, "states",
                                    "take a smaller memory=, or offload fewer param_groups");
}

void drop(void* array) { delete static_cast<Slab*>(array); }

// Where a thread beside training frees the last array, training goes on while the device is waited
// for.
void drop_copy(void* array) {
  std::optional<py::gil_scoped_release> others_run;
  if (PyGILState_Check()) others_run.emplace();
  drop(array);
}

// A tensor in a slab, laid out as another one. Its storage is its own, of its exact size.
at::Tensor array_in(const Slab& slab, const at::Tensor& like, const at::Device& device,
                    void (*drop_array)(void*)) {
  const at::Tensor layout = at::empty_like(like, like.options().device(at::kMeta));
  return at::for_blob(slab->take(host_bytes(like.numel(), like.scalar_type())), like.sizes())
      .strides(layout.strides())
      .context(new Slab(slab), drop_array)
      .options(like.options().device(device))
      .target_device(device)
      .make_tensor();
}

}  // namespace

HostRoom::HostRoom(const BytesByDevice& bytes) {
  Slabs made;
  for (const auto& [device, count] : bytes)
    if (count > 0) made[device] = slab_for_states(count, at::Device(at::kCUDA, device));
  room = std::move(made);
}

HostRoom::~HostRoom() { room.clear(); }

size_t host_bytes(int64_t count, at::ScalarType dtype) {
  return count < 4096 ? 0 : (size_t(count) * c10::elementSize(dtype) + 255) / 256 * 256;
}

at::Tensor copy_to_host(const at::Tensor& t) {
  const size_t bytes = host_bytes(t.numel(), t.scalar_type());
  Slab slab = room[t.device().index()];
  if (!slab || !slab->has_room(bytes)) slab = slab_for_states(bytes, t.device());
  return array_in(slab, t, t.device(), &drop).copy_(t);
}

std::vector<at::Tensor> copies_on_host(const std::vector<at::Tensor>& tensors) {
  const auto bytes_of = [](const at::Tensor& t) {
    return t.is_cuda() ? host_bytes(t.numel(), t.scalar_type()) : 0;
  };
  BytesByDevice bytes;
  for (const at::Tensor& t : tensors) bytes[t.device().index()] += bytes_of(t);
  Slabs slabs;
  for (const auto& [device, count] : bytes)
    if (count > 0)
      slabs[device] = std::make_shared<HostSlab>(count, at::Device(at::kCUDA, device),
                                                 "a copy of what is saved", "or pass wait=True");
  std::vector<at::Tensor> copies;
  for (const at::Tensor& t : tensors)
    copies.push_back((bytes_of(t) ? array_in(slabs[t.device().index()], t, at::kCPU, &drop_copy)
                                  : at::empty_like(t, t.options().device(at::kCPU)))
                         .copy_(t));
  return copies;
}

bool is_on_host(const at::Tensor& t) {
  return t.is_cuda() && t.has_storage() && t.storage().data_ptr().get_deleter() == &drop;
}

}  // namespace amp_mp
