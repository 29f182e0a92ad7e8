#pragma once
// The float32 values that a low-precision weight was rounded from, stored as what the weight lacks
// (optim/state/original_values.py). Weights and values are plain tensors, of a DTensor the part on
// this process.
#include <torch/csrc/utils/pybind.h>

#include "torch/checks.h"

namespace py = pybind11;

namespace amp_mp {

// The weight's checksum, and the values as tensors, as short as they can be had again exactly: the
// remainders, int16 in the weight's shape, then the flat indices and the float32 values of those
// elements that weight and remainder do not give exactly (bfloat16: ties that round down, 4 in a
// million; float16: below 2^-16 and above 65504). Where this would take more than float32, and for
// weights that the native code does not read, they are the float32 tensor alone.
std::pair<int64_t, Tensors> encode_original(const py::object& weight, const at::Tensor& values,
                                            bool by_place);

// The values, a new float32 tensor with the weight's shape, layout and device.
at::Tensor decode_original(const at::Tensor& weight, const Tensors& stored);

// Whether the weight is what the values were rounded to. `by_place`: whether the checksum sees the
// elements' places.
bool is_rounded_original(const at::Tensor& weight, const Tensors& stored, int64_t checksum,
                         bool by_place);

}  // namespace amp_mp
