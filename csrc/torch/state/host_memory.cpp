#include "torch/state/host_memory.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>

#include <atomic>

#include "torch/device.h"

namespace amp_mp {
namespace {

std::atomic<size_t> held = 0;  // bytes of all slabs

class HostSlab {
 public:
  HostSlab(size_t bytes, const at::Device& device) : bytes_(bytes), device_(device) {
    TORCH_CHECK(cuda::addresses_host(device.index()), device,
                " cannot address host memory; leave out offload=\"state\"");
    const c10::OptionalDeviceGuard guard(device);
    const char* error = cuda::allocate_on_host(bytes, memory_);
    const auto gib = [](size_t n) { return double(n * 10 >> 30) / 10; };
    TORCH_CHECK(!error, "amp_mp: the host gave no pinned memory for states (", gib(bytes),
                " GiB asked, ", gib(held), " GiB held): ", error,
                ". It cannot be swapped: see the container's limit and ulimit -l, take a smaller "
                "memory=, or offload fewer param_groups");
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
thread_local std::map<c10::DeviceIndex, Slab> room;

void drop(void* array) { delete static_cast<Slab*>(array); }

}  // namespace

HostRoom::HostRoom(const BytesByDevice& bytes) {
  std::map<c10::DeviceIndex, Slab> made;
  for (const auto& [device, count] : bytes)
    if (count > 0) made[device] = std::make_shared<HostSlab>(count, at::Device(at::kCUDA, device));
  room = std::move(made);
}

HostRoom::~HostRoom() { room.clear(); }

size_t host_bytes(int64_t count, at::ScalarType dtype) {
  return count < 4096 ? 0 : (size_t(count) * c10::elementSize(dtype) + 255) / 256 * 256;
}

at::Tensor copy_to_host(const at::Tensor& t) {
  const at::Tensor layout = at::empty_like(t, t.options().device(at::kMeta));
  const size_t bytes = host_bytes(t.numel(), t.scalar_type());
  Slab slab = room[t.device().index()];
  if (!slab || !slab->has_room(bytes)) slab = std::make_shared<HostSlab>(bytes, t.device());
  return at::for_blob(slab->take(bytes), t.sizes())
      .strides(layout.strides())
      .context(new Slab(slab), &drop)
      .options(t.options())
      .target_device(t.device())
      .make_tensor()
      .copy_(t);
}

bool is_on_host(const at::Tensor& t) {
  return t.is_cuda() && t.has_storage() && t.storage().data_ptr().get_deleter() == &drop;
}

}  // namespace amp_mp
