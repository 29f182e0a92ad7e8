#pragma once
// Pinned memory of the host that CUDA devices address, for param_groups with offload="state". An
// array in it is a CUDA tensor, in which kernels and torch's operators work as in any other. It is
// freed with the last array of a slab, when its device has done what was queued by then; never
// where a CUDA graph has captured one, or is captured just then.
#include <map>

#include "torch/checks.h"

namespace amp_mp {

using BytesByDevice = std::map<c10::DeviceIndex, size_t>;

// Slabs for what this thread copies to the host while this lives, since pinning is slow; what finds
// no room there has a slab of its own. RuntimeError where the host has no memory.
class HostRoom {
 public:
  explicit HostRoom(const BytesByDevice& bytes);
  HostRoom(const HostRoom&) = delete;
  ~HostRoom();
};

// What an array takes of it: nothing where it is small, and so stays beside its parameter.
size_t host_bytes(int64_t count, at::ScalarType dtype);
at::Tensor copy_to_host(const at::Tensor& t);
bool is_on_host(const at::Tensor& t);

}  // namespace amp_mp
