#include <ATen/Parallel.h>

#include <algorithm>
#include <limits>

#include "cpu/kernels.h"
#include "torch/products/products.h"

namespace amp_mp::products {
namespace {

// Rows up to which the loops are faster than any product for which weights are converted first.
constexpr int64_t kFew = 16;

// Multiplications up to which they are for any number of rows. MKL reaches half of the loops' speed
// on AMD's processors, for which it does not use AVX-512.
int64_t most_multiplications() {
#if defined(__x86_64__)
  static const bool amd = __builtin_cpu_is("amd") != 0;
  return amd ? std::numeric_limits<int64_t>::max() : int64_t(1) << 24;
#else
  return int64_t(1) << 20;
#endif
}

// Multiplications of a thread's part, at least, and what the number of its columns divides by.
constexpr int64_t kPart = int64_t(1) << 18, kColumns = 64;

Matrix matrix(const at::Tensor& t) {
  return t.defined() ? Matrix{t.const_data_ptr(), t.stride(0), t.stride(1)} : Matrix{};
}

}  // namespace

bool multiply_by_loops(const at::Tensor& out, const at::Tensor& summand, const at::Tensor& a,
                       const at::Tensor& b, double beta, double alpha) {
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  if (n < m)
    return multiply_by_loops(out.t(), summand.defined() ? summand.t() : summand, b.t(), a.t(), beta,
                             alpha);
  if ((m > kFew && m * n * k > most_multiplications()) || (b.stride(0) != 1 && b.stride(1) != 1))
    return false;
  const Format format = a.scalar_type() == at::kHalf ? Format::float16 : Format::bfloat16;
  const Product product{
      format,       m,          n, k, matrix(a), matrix(b), matrix(summand), matrix(out),
      float(alpha), float(beta)};
  const int64_t parts = (n + kColumns - 1) / kColumns, grain = kPart / (m * k * kColumns) + 1;
  at::parallel_for(0, parts, grain, [&](int64_t begin, int64_t end) {
    cpu::kernels()->multiply(product, begin * kColumns, std::min(n, end * kColumns));
  });
  return true;
}

}  // namespace amp_mp::products
