#pragma once
// The kernels that run while autocast is on, for operators that have a policy.
#include <torch/library.h>

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "torch/casting/large_products.h"

namespace amp_mp::casting {

// With every policy, what an operator writes into decides: the other arguments are cast to its
// dtype (in place, and out=).
// Note: What is written decides (docs/design.md)
enum class OpPolicy : int {
  stock,                   // what torch's own autocast does
  unchanged,               // no casts, as an operator on no list
  low_precision,           // to the autocast dtype
  float32,                 // low-precision arguments to float32
  widest,                  // to the widest dtype among the arguments
  set_output_dtype,        // arguments as they are, `dtype=` float32 unless given
  banned,                  // raises if an argument is low precision
  bfloat16_only,           // to the autocast dtype if that is bfloat16, else to float32
  low_precision_if_large,  // products on a CPU: in float32 if that is faster (large_products.h)
};

// One operator on one device type. Never freed: kernels may still be running.
struct Entry {
  std::string name;
  at::DeviceType device;
  c10::DispatchKey key;
  std::atomic<OpPolicy> policy{OpPolicy::stock};
  std::optional<c10::SafeKernelFunction> stock;  // torch's own autocast kernel, if it has one
  int dtype_argument = -1;                       // index of `dtype`, if the schema has one
  std::vector<bool> written;  // for each argument, whether the operator writes it (in-place, out=)
  bool writes = false;        // whether it writes any argument
  bool in_place = false;      // whether it writes one that is not out=
  Operands operands;          // of a matrix product
  std::optional<torch::Library> registration;  // of its kernel

  // Whether autocast may cast this tensor: floating point but not double, on the entry's device.
  bool is_eligible(const at::Tensor& t) const {
    return t.defined() && t.is_floating_point() && t.scalar_type() != at::kDouble &&
           t.device().type() == device;
  }

  // Whether OpPolicy::low_precision_if_large looks at sizes: for products on a CPU.
  bool depends_on_size() const { return device == at::kCPU && operands.left >= 0; }
};

// A boxed kernel, which fits every operator. It reads the entry's policy at each call.
struct BoxedKernel : c10::OperatorKernel {
  explicit BoxedKernel(Entry* entry) : e(entry) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack);
  Entry* e;
};

// The kernel to register: an unboxed one for the products that have one (autocast_product.cpp).
torch::CppFunction kernel_of(Entry* entry, const c10::OperatorHandle& op);

}  // namespace amp_mp::casting
