#pragma once
// Checks at the door: after them the kernels trust their pointers. Each names the tensor and the
// cure.
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "plan.h"

namespace amp_mp {

using Tensors = std::vector<at::Tensor>;

// "grads[3]", or a name the caller gave.
struct Label {
  const char* argument;
  int64_t index = -1;
  const std::string* name = nullptr;  // has to outlive the label
  std::string text() const;
};

std::string describe(const at::Tensor& t);  // "shape [2, 3], dtype Half, device cpu"

// DTensor, FakeTensor, a functorch wrapper: without memory of its own.
bool is_subclass(const at::Tensor& t);

// A plain strided tensor on a CPU or a CUDA device whose data may be touched through a pointer: not
// a subclass (DTensor, FakeTensor, functorch), not sparse, not a lazily negated view.
void check_plain(const at::Tensor& t, const Label& label);

// The tensor's format: float32, float16 or bfloat16, anything else is refused.
Format check_format(const at::Tensor& t, const Label& label);

// The tensor's memory, to read from. (Only for reading: it leaves a lazy copy shared.)
Array array_of(const at::Tensor& t, const Label& label);

// What a pass writes to: plain, each element once in memory, and with a version counter to bump.
void check_writable(const at::Tensor& t, const Label& label);

void check_device(const at::Tensor& t, const at::Device& device, const Label& label);
void check_dtype(const at::Tensor& t, at::ScalarType dtype, const Label& label);

// Whether elements of equal index lie at equal offsets in memory.
bool same_layout(const at::Tensor& a, const at::Tensor& b);
void check_same_layout(const at::Tensor& t, const at::Tensor& like, const Label& label,
                       const Label& like_label);

// No two of the tensors share memory.
void check_no_overlap(const std::vector<std::pair<at::Tensor, Label>>& written);

// Tells autograd that the tensor has changed; a backward that still needs the old value then
// raises.
void bump_version(const at::Tensor& t);

}  // namespace amp_mp
