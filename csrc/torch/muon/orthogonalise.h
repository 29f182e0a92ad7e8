#pragma once
// Where Muon's directions are in memory; orthogonalise.cpp makes each matrix in them orthogonal.
#include <ATen/core/Tensor.h>

#include <vector>

namespace amp_mp::muon {

// Where each parameter's directions begin in the memory of all, and where that memory ends. Each
// begins at a multiple of 16 bytes, as the widest loads and the fastest products need it.
std::vector<int64_t> direction_offsets(const std::vector<at::Tensor>& params);

}  // namespace amp_mp::muon
