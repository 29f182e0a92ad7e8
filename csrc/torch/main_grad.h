#pragma once
// Weight gradients of linear layers in float32: low-precision products added to a float32 sum.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace amp_mp {

// cublasGemmEx of a cuBLAS that is in the process already: the running torch's own. Neither its
// headers nor the library are needed for building. What is declared here is what cuBLAS documents:
// column-major matrices, enums as ints.
class Gemm {
 public:
  using Function = int (*)(void* handle, int transa, int transb, int m, int n, int k,
                           const void* alpha, const void* a, int a_type, int lda, const void* b,
                           int b_type, int ldb, const void* beta, void* c, int c_type, int ldc,
                           int compute_type, int algorithm);

  // library: a name such as "libcublas.so.13"; raises where no such library is loaded.
  explicit Gemm(const std::string& library);

  Function function;
};

// grad_weight += grad_output^T input over all rows; float32 products and sums.
//
// grad_weight: float32 [out, in], contiguous. grad_output: [..., out] and input: [..., in], of
// equal leading sizes, both float16, bfloat16 or float32. Products of two float16 or two bfloat16
// numbers are exact in float32. On a CPU rows are converted 512 at a time: 2 KiB of scratch a
// column of both.
//
// With `gemm` the product is cuBLAS's, on the device and stream of `handle` (cublasHandle_t); CUDA
// tensors need it.
void accumulate_weight_grad_(const at::Tensor& grad_weight, const at::Tensor& grad_output,
                             const at::Tensor& input, const std::optional<Gemm>& gemm,
                             uintptr_t handle);

// What becomes of a leaf's gradient in the backward that this thread is in: true where it is added
// to .grad, false where autograd.grad returns it, nothing where nobody has asked for it.
std::optional<bool> accumulates(const at::Tensor& leaf);

}  // namespace amp_mp
