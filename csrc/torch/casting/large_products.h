#pragma once
// Which matrix products are so large that they are faster in low precision on a CPU. oneDNN's
// bfloat16 product needs 10 us before its first multiplication, and the casts need time too: a
// small product is up to ten times faster in float32. products/sizes.cpp has the table of sizes.
#include <ATen/core/function_schema.h>

namespace amp_mp::casting {

// Indices of the arguments that are the factors of a product; left < 0 if the operator is none.
// transposed: the right factor is given transposed, as in linear.
struct Operands {
  int left = -1, right = -1;
  bool transposed = false;
};

// Finds the factors by argument names and types: of mm, bmm, addmm, matmul, linear, lstm_cell and
// so on.
Operands operands_of(const c10::FunctionSchema& schema);

// Whether the product is faster in low precision, the cast of the left factor included. Matrix
// times vector never is, and no product on a processor that computes them in float32 (products.h).
bool is_faster(at::ScalarType low, const at::Tensor& left, const at::Tensor& right,
               bool transposed);

}  // namespace amp_mp::casting
