#pragma once
// Arrays of a format as tensors: makes them beside a parameter, fills and reads them. Tensors here
// are plain and dense; for a DTensor they are the part on this process. Functions with a handle
// need the GIL.
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "torch/python/objects.h"

namespace amp_mp {

// The format of masters whose remainders are packed, two in a byte.
constexpr Format kPackedMaster = Format::bfloat16_split20;

// Whether a format's groups fit into a parameter's rows in memory. A group must not reach from one
// row into the next, whose gradients have another size. A tensor of one dimension (a bias, a norm's
// weight) has no rows: its neighbours are unrelated. For a DTensor the whole tensor's rows count,
// so that all processes agree, and it must be cut between groups. Packed remainders need a
// row-major weight besides, because no other tensor of its shape says how they lie.
bool has_groups(Format format, py::handle param);

// The shape of the second array of a format of groups, which can be split over processes as the
// parameter is; flat if groups lie neither along the last dimension nor within the rows of the
// first. `part`: a shard's shape, for the shape of its array.
std::vector<int64_t> second_shape(Format format, py::handle param,
                                  const std::optional<std::vector<int64_t>>& part = {});
// The same of a part of a row-major tensor, or not, of these sizes.
std::vector<int64_t> grouped_shape(at::IntArrayRef sizes, std::vector<int64_t> part, int64_t group,
                                   bool row_major);

// The format in which a state of the declared format is stored for this parameter. (A master's:
// master_entry in rule_table.h.)
Format format_beside(Format declared, py::handle param);

// The kernels' form of a state's format: bfloat16 states are always rounded stochastically.
Format native(Format format);

// Where a DTensor's shard begins. origin_for: zeros if the format draws no random bits.
Origin origin_of(py::handle dtensor);
Origin origin_for(py::handle param, Format format);

// This process's part of a tensor that is split as the parameter is, or could be.
at::Tensor part_of(py::handle value, py::handle param);

// The value where its parameter is: itself, or a copy of the parameter's layout and device.
at::Tensor placed(const at::Tensor& value, const at::Tensor& param);

// A copy of a value in a dtype, with the layout and device of `local`. A value that shows the bytes
// of 16-bit integers becomes these; other numbers are converted.
at::Tensor copy_as(const at::Tensor& value, at::ScalarType dtype, const at::Tensor& local);

// Stores the values of one array in another of its layout.
void copy_array(const ArrayTensors& from, const ArrayTensors& to);

// The values of an array, float32 in the layout of its data.
at::Tensor values_of(const ArrayTensors& from);

// Stores values of the data's shape. Random bits depend on a seed, a step and a tensor; the data is
// this tensor or a shard of it.
void store_values(const at::Tensor& values, const ArrayTensors& to, uint64_t seed = 0,
                  int64_t tensor_index = 0, const Origin& origin = {}, int64_t step = 0);

// Zeros of a format for a parameter.
ArrayTensors new_arrays(Format format, py::handle param);

// New arrays of a format beside a parameter, which hold these values.
ArrayTensors encoded(const at::Tensor& values, Format format, py::handle param, uint64_t seed = 0,
                     int64_t tensor_index = 0, int64_t step = 0);

// A file's state as the parameter's group stores it, in new tensors. given: this process's part of
// the file's.
ArrayTensors converted(py::handle param, Format declared, const ArrayTensors& given, uint64_t seed,
                       int64_t tensor_index);

}  // namespace amp_mp
