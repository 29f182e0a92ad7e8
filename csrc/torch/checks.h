#pragma once
// Checks of tensors. After them the kernels use pointers without further checks. Each error names
// the tensor, what was found and what to do.
#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "plan.h"

namespace amp_mp {

using Tensors = std::vector<at::Tensor>;

// How errors name a tensor: "grads[3]", or "the gradient of layer.weight".
struct Label {
  const char* argument;
  int64_t index = -1;
  const std::string* name = nullptr;  // must live as long as the label
  std::string text() const;
};

std::string describe(const at::Tensor& t);  // "shape [2, 3], dtype Half, device cpu"

// Whether the dtype is float16 or bfloat16.
inline bool is_low(at::ScalarType t) { return t == at::kHalf || t == at::kBFloat16; }
inline bool is_low_precision(const at::Tensor& t) { return is_low(t.scalar_type()); }

// Whether the tensor is a DTensor, FakeTensor or functorch wrapper, without memory of its own.
bool is_subclass(const at::Tensor& t);

// Whether every element lies in the tensor's storage. A ZeroTensor has none, and neither has a
// storage that was made smaller (FSDP frees parameters so).
bool has_memory(const at::Tensor& t);

// Whether the passes can read and write the gradient in place, on this device.
bool is_native_gradient(const at::Tensor& grad, const at::Device& device);

// A tensor's numbers on the host, float64 and contiguous; waits for its device. ValueError where it
// has no memory for them.
at::Tensor doubles_on_host(const at::Tensor& t);

// A ZeroTensor as zeros that have memory; any other tensor itself.
at::Tensor with_memory(const at::Tensor& t);

// Raises unless the tensor's data can be read through a pointer: a dense tensor on a CPU or CUDA
// device with memory for its elements, no subclass.
void check_plain(const at::Tensor& t, const Label& label);

// dtypes of the tensors that store a format: of the data, and of the second array (Undefined if the
// format has none).
at::ScalarType dtype_of(Format format);
at::ScalarType second_dtype_of(Format format);

// An Array as tensors; `second` is undefined for a format of one array.
struct ArrayTensors {
  at::Tensor data;
  Format format;
  at::Tensor second;
};

// What a parameter and its master (a float32 tensor or remainders) are together; none if their
// dtypes do not go together.
std::optional<ArrayTensors> master_in(const at::Tensor& param, const at::Tensor& master);

// The tensor's format, float32, float16 or bfloat16; raises for other dtypes.
Format check_format(const at::Tensor& t, const Label& label);

// The tensor's memory, for reading only: writing to it would also change lazy copies.
Array array_of(const at::Tensor& t, const Label& label);

// Raises unless a pass can write to the tensor: plain, without gaps or repeated elements, and with
// a version counter.
void check_writable(const at::Tensor& t, const Label& label);

void check_device(const at::Tensor& t, const at::Device& device, const Label& label);
void check_dtype(const at::Tensor& t, at::ScalarType dtype, const Label& label);

// Whether elements of equal index have equal offsets in memory.
bool same_layout(const at::Tensor& a, const at::Tensor& b);
void check_same_layout(const at::Tensor& t, const at::Tensor& like, const Label& label,
                       const Label& like_label);
void check_same_sizes(const at::Tensor& t, const at::Tensor& like, const Label& label,
                      const Label& like_label);

// `t` where `like` is: itself, or a copy of its device and layout, which `kept` holds.
const at::Tensor& laid_out_as(const at::Tensor& like, const at::Tensor& t, Tensors& kept);

// Raises if two of the tensors share memory.
void check_no_overlap(const std::vector<std::pair<at::Tensor, Label>>& written);

// Tells autograd that the tensor has changed, so that a backward that needs the old value raises.
void bump_version(const at::Tensor& t);

}  // namespace amp_mp
