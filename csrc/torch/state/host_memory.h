#pragma once
// Pinned memory of the host that CUDA devices address, for param_groups with offload="state". An
// array in it is a CUDA tensor, in which kernels and torch's operators work as in any other. A slab
// is freed after its last array, when the device has done all work that was queued by then; never
// if a CUDA graph has captured one of its arrays, or is being captured just then.
#include <map>

#include "torch/checks.h"

namespace amp_mp {

using BytesByDevice = std::map<c10::DeviceIndex, size_t>;

// Slabs for arrays that this thread copies to the host in the lifetime of this object: pinning is
// slow. An array without room there gets a slab of its own. RuntimeError if the host has no memory.
class HostRoom {
 public:
  explicit HostRoom(const BytesByDevice& bytes);
  HostRoom(const HostRoom&) = delete;
  ~HostRoom();
};

// The bytes that an array takes there: 0 for a small one, which stays beside its parameter.
size_t host_bytes(int64_t count, at::ScalarType dtype);
at::Tensor copy_to_host(const at::Tensor& t);
bool is_on_host(const at::Tensor& t);

// CPU tensors of the same values, complete on return. Each has a storage of its own, of its exact
// size; those of large CUDA tensors are pinned, in one slab for each device.
std::vector<at::Tensor> copies_on_host(const std::vector<at::Tensor>& tensors);

}  // namespace amp_mp
