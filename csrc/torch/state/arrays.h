#pragma once
// The arrays of a format as whole tensors: made beside a parameter, filled and read. Tensors here
// are plain and dense, of a DTensor the part on this process. What takes a handle needs the GIL.
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torch/python/objects.h"

namespace amp_mp {

// Whether groups fit into a parameter's rows as they lie in memory. A group must not reach from one
// row into the next, whose gradients have another size. A tensor of one dimension (a bias, a norm's
// weight) has no rows: its neighbours are unrelated. Of a DTensor the whole tensor's rows count, so
// that all processes agree, and it must be cut between groups.
bool has_groups(py::handle param);

// The shape of the groups' scales: one that can be split over processes as the parameter is. Where
// groups do not lie along the last dimension, nor within the rows of the first, it is flat. `part`:
// the shape of a shard; gives the shape of its scales.
std::vector<int64_t> scale_shape(py::handle param,
                                 const std::optional<std::vector<int64_t>>& part = {});

// The format in which a state of the declared format is stored for this parameter.
Format format_beside(Format declared, py::handle param);

// The kernels' form of a state's format: bfloat16 states are always rounded stochastically.
Format native(Format format);

// Where a DTensor's shard begins. origin_for: as far as the format's random bits depend on it.
Origin origin_of(py::handle dtensor);
Origin origin_for(py::handle param, Format format);

// The value where its parameter is: itself, or a copy of the parameter's layout and device.
at::Tensor placed(const at::Tensor& value, const at::Tensor& param);

// A copy of a value in a dtype, with the layout and device of `local`. A value that shows the bytes
// of 16-bit integers becomes these; other numbers are converted.
at::Tensor copy_as(const at::Tensor& value, at::ScalarType dtype, const at::Tensor& local);

// The values of an array, float32 in the layout of its data.
at::Tensor values_of(const ArrayTensors& from);

// Stores values of the data's shape. Random bits are those of a seed, a step and a tensor, of which
// the data is the whole or a shard.
void store_values(const at::Tensor& values, const ArrayTensors& to, uint64_t seed = 0,
                  int64_t tensor_index = 0, const Origin& origin = {}, int64_t step = 0);

// Zeros of a format for a parameter.
ArrayTensors new_arrays(Format format, py::handle param);

// New arrays of a format beside a parameter, which hold these values.
ArrayTensors encoded(const at::Tensor& values, Format format, py::handle param, uint64_t seed = 0,
                     int64_t tensor_index = 0, int64_t step = 0);

// A state of a file as the parameter's group stores it, in new tensors. given: what the parameter
// has of it.
ArrayTensors converted(py::handle param, Format declared, const ArrayTensors& given, uint64_t seed,
                       int64_t tensor_index);

}  // namespace amp_mp
