#pragma once
// Weight gradients of linear layers in float32: adds low-precision products to a float32 sum.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace amp_mp {

// cublasGemmEx of the cuBLAS that torch has loaded, found by name, so that building needs neither
// its headers nor the library. The signature is the documented one with ints for the enums;
// matrices are column-major.
class Gemm {
 public:
  using Function = int (*)(void* handle, int transa, int transb, int m, int n, int k,
                           const void* alpha, const void* a, int a_type, int lda, const void* b,
                           int b_type, int ldb, const void* beta, void* c, int c_type, int ldc,
                           int compute_type, int algorithm);

  // library: a name such as "libcublas.so.13"; raises if it is not loaded.
  explicit Gemm(const std::string& library);

  Function function;
};

// grad_weight += grad_output^T input over all rows; float32 products and sums.
//
// grad_weight: float32 [out, in], contiguous. grad_output: [..., out] and input: [..., in], of
// equal leading sizes, both float16, bfloat16 or float32. Products of two float16 or two bfloat16
// numbers are exact in float32. On a CPU rows are converted 512 at a time, which needs 2 KiB of
// scratch for each column of grad_output and input.
//
// With `gemm` cuBLAS computes the product, on the device and stream of `handle` (cublasHandle_t).
// CUDA tensors need it.
void accumulate_weight_grad_(const at::Tensor& grad_weight, const at::Tensor& grad_output,
                             const at::Tensor& input, const std::optional<Gemm>& gemm,
                             uintptr_t handle);

// How the backward that is running on this thread uses a leaf's gradient: true if it is added to
// .grad, false if autograd.grad returns it, nullopt if it is not needed.
std::optional<bool> accumulates(const at::Tensor& leaf);

}  // namespace amp_mp
