// Weight gradients of linear layers in float32: adds low-precision products to a float32 sum.
#include <ATen/ops/resolve_neg.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <limits>

#include "torch/bind.h"
#include "torch/checks.h"

namespace amp_mp {
namespace {

// cublasGemmEx of the cuBLAS that torch has loaded, found by name, so that building needs neither
// its headers nor the library. The signature is the documented one with ints for the enums;
// matrices are column-major.
struct Gemm {
  using Function = int (*)(void* handle, int transa, int transb, int m, int n, int k,
                           const void* alpha, const void* a, int a_type, int lda, const void* b,
                           int b_type, int ldb, const void* beta, void* c, int c_type, int ldc,
                           int compute_type, int algorithm);

  // library: a name such as "libcublas.so.13"; raises if it is not loaded.
  explicit Gemm(const std::string& library) {
    // Never closed: torch keeps the library loaded for the life of the process anyway.
    void* found = dlopen(library.c_str(), RTLD_NOLOAD | RTLD_NOW);
    function = found ? reinterpret_cast<Function>(dlsym(found, "cublasGemmEx")) : nullptr;
    TORCH_CHECK(function, "amp_mp: library ", library,
                found ? " has no cublasGemmEx" : " is not loaded in this process");
  }

  Function function;
};

constexpr int64_t kBlock = 512;  // rows at a time: enough that reading the sum again costs little

// Values of cublasOperation_t, cudaDataType_t, cublasComputeType_t, cublasGemmAlgo_t.
constexpr int kNormal = 0, kTransposed = 1;
constexpr int kReal32 = 0, kReal16 = 2, kRealBfloat16 = 14;
constexpr int kCompute32 = 68;
constexpr int kDefaultAlgorithm = -1;

int data_type(at::ScalarType t) {
  return t == at::kHalf ? kReal16 : t == at::kBFloat16 ? kRealBfloat16 : kReal32;
}

// [..., columns] as a matrix with contiguous rows, which may be apart; a copy only if necessary.
at::Tensor rows_of(const at::Tensor& t) {
  const at::Tensor rows = at::resolve_neg(t).unsqueeze(0).flatten(0, -2);
  return rows.stride(1) == 1 && rows.stride(0) >= rows.size(1) ? rows : rows.contiguous();
}

void check(const at::Tensor& grad_weight, const at::Tensor& grad_output, const at::Tensor& input) {
  const Label sum{"grad_weight"}, left{"grad_output"}, right{"input"};
  check_writable(grad_weight, sum);
  check_dtype(grad_weight, at::kFloat, sum);
  TORCH_CHECK_VALUE(grad_weight.dim() == 2 && grad_weight.is_contiguous(), "amp_mp: grad_weight (",
                    describe(grad_weight), ", strides ", grad_weight.strides(),
                    ") must be a contiguous matrix [out, in]");
  check_plain(grad_output, left);
  check_plain(input, right);
  check_device(grad_output, grad_weight.device(), left);
  check_device(input, grad_weight.device(), right);
  check_format(grad_output, left);
  check_dtype(input, grad_output.scalar_type(), right);
  const int64_t out = grad_weight.size(0), in = grad_weight.size(1);
  TORCH_CHECK_VALUE(grad_output.dim() > 0 && grad_output.size(-1) == out, "amp_mp: grad_output (",
                    describe(grad_output), ") must have shape [..., ", out,
                    "] to go with grad_weight's ", grad_weight.sizes());
  TORCH_CHECK_VALUE(input.dim() == grad_output.dim() && input.size(-1) == in, "amp_mp: input (",
                    describe(input), ") must have shape [..., ", in,
                    "] with as many dimensions as grad_output, to go with grad_weight's ",
                    grad_weight.sizes());
  for (int64_t d = 0; d + 1 < input.dim(); ++d)
    TORCH_CHECK_VALUE(input.size(d) == grad_output.size(d), "amp_mp: input (", describe(input),
                      ") and grad_output (", describe(grad_output),
                      ") must agree in all sizes but the last");
}

void add_on_cpu(const at::Tensor& sum, const at::Tensor& left, const at::Tensor& right) {
  const int64_t rows = left.scalar_type() == at::kFloat ? left.size(0) : kBlock;
  const auto parts = right.split(rows);
  size_t i = 0;
  for (const at::Tensor& part : left.split(rows))
    sum.addmm_(part.to(at::kFloat).t(), parts[i++].to(at::kFloat));
}

// cuBLAS is column-major, so our row-major matrices are transposed for it: the sum [out, in] is an
// [in, out] matrix, the input [rows, in] is [in, rows], the gradient [rows, out] is [out, rows]. It
// therefore computes "input" times "gradient" transposed.
void add_by_gemm(const at::Tensor& sum, const at::Tensor& left, const at::Tensor& right,
                 Gemm::Function gemm, uintptr_t handle) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  const int64_t out = sum.size(0), in = sum.size(1), rows = left.size(0);
  TORCH_CHECK_VALUE(
      out <= kMost && in <= kMost && left.stride(0) <= kMost && right.stride(0) <= kMost,
      "amp_mp: grad_weight (", describe(sum), ") has a size beyond ", kMost,
      ", which cuBLAS does not take");
  const int type = data_type(left.scalar_type());
  const auto width = int64_t(left.element_size());
  const auto* a = static_cast<const char*>(right.const_data_ptr());
  const auto* b = static_cast<const char*>(left.const_data_ptr());
  const float one = 1.0f;
  for (int64_t first = 0; first < rows; first += kMost) {
    const int count = int(std::min(kMost, rows - first));
    const int status =
        gemm(reinterpret_cast<void*>(handle), kNormal, kTransposed, int(in), int(out), count, &one,
             a + first * right.stride(0) * width, type, int(right.stride(0)),
             b + first * left.stride(0) * width, type, int(left.stride(0)), &one,
             sum.mutable_data_ptr(), kReal32, int(in), kCompute32, kDefaultAlgorithm);
    TORCH_CHECK(status == 0, "amp_mp: cublasGemmEx answered with status ", status, " to [", out,
                ", ", in, "] += [", count, ", ", out, "]^T [", count, ", ", in, "] of ",
                left.scalar_type(), " on ", sum.device());
  }
}

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
                             uintptr_t handle) {
  check(grad_weight, grad_output, input);
  TORCH_CHECK_VALUE(gemm || grad_weight.is_cpu(), "amp_mp: grad_weight (", describe(grad_weight),
                    ") is on a GPU; pass gemm and handle, cuBLAS's");
  const c10::OptionalDeviceGuard guard(grad_weight.device());
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  const at::AutoDispatchBelowADInplaceOrView no_graph;
  const at::Tensor left = rows_of(grad_output), right = rows_of(input);
  if (grad_weight.numel() > 0 && left.size(0) > 0) {
    if (gemm)
      add_by_gemm(grad_weight, left, right, gemm->function, handle);
    else
      add_on_cpu(grad_weight, left, right);
  }
  bump_version(grad_weight);
}

// How the backward that is running on this thread uses a leaf's gradient: true if it is added to
// .grad, false if autograd.grad returns it, nullopt if it is not needed.
std::optional<bool> accumulates(const at::Tensor& leaf) {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  TORCH_CHECK(wanted, "amp_mp: accumulates is for use inside a backward");
  if (wanted->empty()) return true;  // backward() without inputs=
  const auto found = wanted->find(torch::autograd::impl::try_get_grad_accumulator(leaf).get());
  if (found == wanted->end() || !found->second.should_execute()) return std::nullopt;
  return !found->second.captures_;
}

}  // namespace

void bind_main_grad(py::module_& m) {
  py::class_<Gemm>(m, "Gemm").def(py::init<const std::string&>(), py::arg("library"));
  m.def("accumulate_weight_grad_", &accumulate_weight_grad_, py::arg("grad_weight"),
        py::arg("grad_output"), py::arg("input"), py::arg("gemm") = py::none(),
        py::arg("handle") = 0, py::call_guard<py::gil_scoped_release>());
  m.def("accumulates", &accumulates, py::arg("leaf"));
}

}  // namespace amp_mp
