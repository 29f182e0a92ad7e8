#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include <algorithm>

#include "torch/products/products.h"

namespace amp_mp::products {
namespace {

// A block of a matrix in float32, filled from one part of the matrix after another.
class FloatBlock {
 public:
  // Rows (dim 0) or columns (dim 1) of `from`, at most `count`.
  FloatBlock(const at::Tensor& from, int64_t dim, int64_t count) : from_(from), dim_(dim) {
    std::array<int64_t, 2> sizes = {from.size(0), from.size(1)};
    sizes[size_t(dim)] = count;
    // In the matrix's own order, so that both sides of the conversion are read in a row.
    const bool by_columns = from.stride(0) == 1 && from.stride(1) != 1;
    values_ = at::empty(by_columns ? std::array{sizes[1], sizes[0]} : sizes,
                        from.options().dtype(at::kFloat));
    if (by_columns) values_ = values_.t();
  }

  at::Tensor at(int64_t first, int64_t count) const {
    return values_.narrow(dim_, 0, count).copy_(from_.narrow(dim_, first, count));
  }

 private:
  at::Tensor from_, values_;
  int64_t dim_;
};

at::Tensor whole(const at::Tensor& low) {
  return FloatBlock(low, 0, low.size(0)).at(0, low.size(0));
}

at::Tensor& float_product(at::Tensor& to, const at::Tensor& summand, const at::Tensor& a,
                          const at::Tensor& b, double beta, double alpha) {
  if (!summand.defined() && alpha == 1.0) return at::cpu::mm_out(to, a, b);
  return summand.defined() ? at::cpu::addmm_out(to, summand, a, b, beta, alpha)
                           : at::cpu::addmm_out(to, to, a, b, 0.0, alpha);
}

// Blocks of rows of a and out; all of b is converted once.
void by_rows(const at::Tensor& out, const at::Tensor& summand, const at::Tensor& a,
             const at::Tensor& b, double beta, double alpha) {
  const int64_t m = a.size(0), n = b.size(1);
  const int64_t rows = slices_of_block(m, std::max(a.size(1), n));
  const at::Tensor right = whole(b), results = at::empty({rows, n}, right.options());
  const FloatBlock left(a, 0, rows);
  for (int64_t first = 0; first < m; first += rows) {
    const int64_t count = std::min(rows, m - first);
    at::Tensor result = results.narrow(0, 0, count);
    const at::Tensor added =
        summand.defined() ? summand.narrow(0, first, count).to(at::kFloat) : summand;
    float_product(result, added, left.at(first, count), right, beta, alpha);
    out.narrow(0, first, count).copy_(result);
  }
}

// Blocks of columns of a and rows of b, summed in float32 and rounded once: gradients of weights.
void by_depth(const at::Tensor& out, const at::Tensor& summand, const at::Tensor& a,
              const at::Tensor& b, double beta, double alpha) {
  const int64_t k = a.size(1);
  const int64_t depth = slices_of_block(k, std::max(a.size(0), b.size(1)));
  at::Tensor sum = at::empty({a.size(0), b.size(1)}, out.options().dtype(at::kFloat));
  const FloatBlock left(a, 1, depth), right(b, 0, depth);
  for (int64_t first = 0; first < k; first += depth) {
    const int64_t count = std::min(depth, k - first);
    const at::Tensor x = left.at(first, count), y = right.at(first, count);
    if (first > 0) {
      at::cpu::addmm_out(sum, sum, x, y, 1.0, alpha);
    } else {
      float_product(sum, summand.defined() ? summand.to(at::kFloat) : summand, x, y, beta, alpha);
    }
  }
  out.copy_(sum);
}

}  // namespace

int64_t slices_of_block(int64_t count, int64_t elements, int64_t block) {
  const int64_t fit = std::max<int64_t>(block / std::max<int64_t>(elements, 1), 1);
  const int64_t blocks = (count + fit - 1) / fit;
  return blocks <= 1 ? std::max<int64_t>(count, 1) : (count + blocks - 1) / blocks;
}

void multiply_in_float32(const at::Tensor& out, const at::Tensor& summand, const at::Tensor& a,
                         const at::Tensor& b, double beta, double alpha) {
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  const at::Tensor added = summand.defined() && beta != 0.0 ? summand.expand({m, n}) : at::Tensor();
  if (k > std::max(m, n)) return by_depth(out, added, a, b, beta, alpha);
  if (n > m)
    return by_rows(out.t(), added.defined() ? added.t() : added, b.t(), a.t(), beta, alpha);
  by_rows(out, added, a, b, beta, alpha);
}

void multiply_batches_in_float32(const at::Tensor& out, const at::Tensor& summand,
                                 const at::Tensor& a, const at::Tensor& b, double beta,
                                 double alpha) {
  const int64_t batches = a.size(0), m = a.size(1), k = a.size(2), n = b.size(2);
  const at::Tensor added =
      summand.defined() && beta != 0.0 ? summand.expand({batches, m, n}) : at::Tensor();
  // One by one, so that a matrix has the same bits beside any others: Muon's ranks rely on it, and
  // a batched product's depend on how many there are. For tiny ones that would be all overhead.
  if (m * k * n >= 4096) {
    for (int64_t i = 0; i < batches; ++i)
      multiply_in_float32(out[i], added.defined() ? added[i] : added, a[i], b[i], beta, alpha);
    return;
  }
  const int64_t some = slices_of_block(batches, std::max({m * k, k * n, m * n}));
  const auto in_float = [](const at::Tensor& t, int64_t first, int64_t count) {
    return t.narrow(0, first, count).to(at::kFloat);
  };
  for (int64_t first = 0; first < batches; first += some) {
    const int64_t count = std::min(some, batches - first);
    const at::Tensor x = in_float(a, first, count), y = in_float(b, first, count);
    const at::Tensor result =
        added.defined() ? at::cpu::baddbmm(in_float(added, first, count), x, y, beta, alpha)
                        : (alpha == 1.0 ? at::cpu::bmm(x, y) : at::cpu::bmm(x, y).mul_(alpha));
    out.narrow(0, first, count).copy_(result);
  }
}

}  // namespace amp_mp::products
