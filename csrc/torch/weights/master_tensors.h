#pragma once
// A low-precision weight and the tensor beside it, its float32 master or remainders: together they
// hold a float32 value for each element (core/splits.h). Plain tensors on one device; a DTensor's
// are the parts on this process.
#include "torch/state/arrays.h"

namespace amp_mp {

// Whether both are on one device in one layout, and their dtypes go together.
bool is_beside(const at::Tensor& master, const at::Tensor& weight);

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
