#pragma once
// What runs when an operator that has a policy is called while autocast is on.
#include <torch/library.h>

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "torch/casting/autocast.h"
#include "torch/casting/product.h"

namespace amp_mp::casting {

// What is known of one operator on one device type. Never freed: kernels may still be running.
struct Entry {
  std::string name;
  at::DeviceType device;
  c10::DispatchKey key;
  std::atomic<OpPolicy> policy{OpPolicy::stock};
  std::optional<c10::SafeKernelFunction> stock;  // torch's own autocast kernel, if it has one
  int dtype_argument = -1;                       // index of `dtype`, if the schema has one
  std::vector<bool> written;                     // arguments that are written: in-place, out=
  bool writes = false;
  Operands operands;  // of a matrix product
};

// The kernel to register. It looks at the entry's policy at every call.
torch::CppFunction kernel_of(Entry* entry, const c10::OperatorHandle& op);

}  // namespace amp_mp::casting
