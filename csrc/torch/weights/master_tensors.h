#pragma once
// A low-precision weight and the tensor beside it, its float32 master or remainders: together they
// hold a float32 value for each element (core/splits.h). Plain tensors on one device; a DTensor's
// are the parts on this process.
//
// split20's remainders are packed, two neighbours of a row-major weight in a byte. Whatever is done
// besides steps, reading and moving is done with split24's remainders, which hold the same numbers.
#include "torch/state/arrays.h"
#include "torch/state/rule_table.h"

namespace amp_mp {

// Whether the master is packed, which its dtype says.
inline bool is_packed(const at::Tensor& master) { return master.scalar_type() == at::kByte; }

// The shape of a master of this dtype beside a weight: a whole tensor or a part, a DTensor too.
std::vector<int64_t> master_shape(const at::Tensor& weight, at::ScalarType dtype);

// Whether the master has an element, or half a byte, for each of the weight's.
inline bool is_of_size(const at::Tensor& master, const at::Tensor& weight) {
  return master.sizes() == at::IntArrayRef(master_shape(weight, master.scalar_type()));
}

// Whether both are on one device in one layout, and their dtypes go together.
bool is_beside(const at::Tensor& master, const at::Tensor& weight);

// The master where its weight is: itself, or a copy of the weight's layout and device; split24's
// remainders of packed ones beside a weight that is not row-major any more.
at::Tensor placed_master(const at::Tensor& master, const at::Tensor& weight);

// `made` where the mask of the weight's shape is true, else `old`: masters of one dtype.
at::Tensor chosen(const at::Tensor& mask, const at::Tensor& made, const at::Tensor& old);

// split24's remainders that a file's packed ones stand for, row-major, int8. sizes: the weight's.
at::Tensor unpacked(const at::Tensor& packed, at::IntArrayRef sizes);

// A file's master for this process: a new tensor, and the entry that it belongs under. Needs the
// GIL; all processes must call it in turn.
std::pair<const MasterEntry*, at::Tensor> master_part(const MasterEntry& entry, py::handle value,
                                                      py::handle param);

// The float32 values of a weight and its master, a new tensor of the weight's layout. ValueError if
// their dtypes do not go together.
at::Tensor master_values(const at::Tensor& weight, const at::Tensor& master);

// A new master of this dtype that holds the values of an array, from which the weight was rounded.
// The weight stays: half way between two weights, where formats round differently, the master is
// the nearest to the value that rounds to this one. writes: the weight becomes what the master's
// format rounds to.
at::Tensor made_beside(const ArrayTensors& from, const at::Tensor& weight, at::ScalarType dtype,
                       bool writes = false);

}  // namespace amp_mp
