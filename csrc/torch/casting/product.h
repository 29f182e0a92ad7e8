#pragma once
// Which matrix products are worth casting on a CPU. oneDNN's bfloat16 product costs 10 us before
// the first multiplication, and the casts come on top: a small product is up to ten times faster in
// float32.
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

namespace amp_mp::casting {

// Which of an operator's arguments are the factors of a product; left < 0 where there are none. The
// right one may be given transposed, as in linear.
struct Operands {
  int left = -1, right = -1;
  int arguments = 0;
  bool transposed = false;
};

// Found by names and types: mm, bmm, addmm, matmul, linear, lstm_cell and their kin.
Operands operands_of(const c10::FunctionSchema& schema);

// Whether the product is faster in bfloat16, the cast of the left factor included. Matrix times
// vector never is.
bool is_large(const at::Tensor& left, const at::Tensor& right, bool transposed);
bool is_large(const Operands& operands, const torch::jit::Stack& stack);
bool is_large(int64_t m, int64_t n, int64_t k);

// Whether this processor multiplies bfloat16 itself; others emulate it.
bool has_fast_bfloat16();

}  // namespace amp_mp::casting
