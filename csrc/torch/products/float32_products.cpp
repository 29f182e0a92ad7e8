#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include <algorithm>

#include "torch/products/products.h"

namespace amp_mp::products {
namespace {

// Up to so many multiplications a matrix, each thread multiplies whole matrices of a batch; beyond,
// all threads share each matrix. Starting threads takes as long as so many multiplications.
constexpr int64_t kLarge = int64_t(1) << 23;
// The same for torch's products, also of a single matrix.
constexpr int64_t kSmall = int64_t(1) << 20;
// The least rows and columns of a thread's part of a product: narrower parts multiply slower.
constexpr int64_t kNarrow = 64;

// A block of a matrix, or of a batch of them, in float32, filled from one part after another.
class FloatBlock {
 public:
  // Along `dim` at most `count` of what `from` has there: rows, columns or matrices.
  FloatBlock(const at::Tensor& from, int64_t dim, int64_t count) : from_(from), dim_(dim) {
    c10::SmallVector<int64_t, 3> sizes(from.sizes()), strides(sizes.size());
    sizes[size_t(dim)] = count;
    int64_t &rows = sizes.end()[-2], &columns = sizes.end()[-1];
    // In the matrix's own order, so that both sides of the conversion are read in a row.
    const bool by_columns = from.stride(-2) == 1 && from.stride(-1) != 1;
    strides.end()[-2] = by_columns ? 1 : columns;
    strides.end()[-1] = by_columns ? rows : 1;
    // Each matrix at an aligned address: a product's bits can depend on it.
    if (from.dim() == 3) strides[0] = (rows * columns + 15) / 16 * 16;
    values_ = at::empty_strided(sizes, strides, from.options().dtype(at::kFloat));
  }

  at::Tensor at(int64_t first, int64_t count) const {
    return results(count).copy_(from_.narrow(dim_, first, count));
  }
  at::Tensor results(int64_t count) const { return values_.narrow(dim_, 0, count); }

 private:
  at::Tensor from_, values_;
  int64_t dim_;
};

at::Tensor& float_product(at::Tensor& to, const at::Tensor& summand, const at::Tensor& a,
                          const at::Tensor& b, double beta, double alpha) {
  if (!summand.defined() && alpha == 1.0) return at::cpu::mm_out(to, a, b);
  return summand.defined() ? at::cpu::addmm_out(to, summand, a, b, beta, alpha)
                           : at::cpu::addmm_out(to, to, a, b, 0.0, alpha);
}

// Blocks of columns of b, and for each of them blocks of rows of a and out.
void by_rows(const at::Tensor& out, const at::Tensor& summand, const at::Tensor& a,
             const at::Tensor& b, double beta, double alpha) {
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  const int64_t columns = slices_of_block(n, k, 4 * kBlock);
  const int64_t rows = slices_of_block(m, std::max(k, columns));
  const FloatBlock left(a, 0, rows), right(b, 1, columns);
  const at::Tensor results = at::empty({rows * columns}, out.options().dtype(at::kFloat));
  for (int64_t column = 0; column < n; column += columns) {
    const int64_t width = std::min(columns, n - column);
    const at::Tensor y = right.at(column, width);
    for (int64_t row = 0; row < m; row += rows) {
      const int64_t height = std::min(rows, m - row);
      const auto part = [&](const at::Tensor& whole) {
        return whole.narrow(0, row, height).narrow(1, column, width);
      };
      at::Tensor result = results.narrow(0, 0, height * width).view({height, width});
      const at::Tensor added = summand.defined() ? part(summand).to(at::kFloat) : summand;
      float_product(result, added, left.at(row, height), y, beta, alpha);
      part(out).copy_(result);
    }
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

// One by one, each by all threads where it is large and else by one of them, as if it were alone:
// so a matrix has the same bits beside any others, on which Muon's ranks rely. Those of torch's
// batched product depend on how many there are.
void multiply_batches(const at::Tensor& out, const at::Tensor& summand, const at::Tensor& a,
                      const at::Tensor& b, double beta, double alpha) {
  const int64_t batches = a.size(0), work = a.size(1) * a.size(2) * b.size(2);
  const bool by_loops = uses_loops(a.scalar_type(), a.size(1), b.size(2), a.size(2));
  if (by_loops && work <= kLarge && multiply_by_loops(out, summand, a, b, beta, alpha)) return;
  const auto multiply = [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;  // which threads do not inherit
    for (int64_t i = begin; i < end; ++i)
      multiply_in_float32(out[i], summand.defined() ? summand[i] : summand, a[i], b[i], beta,
                          alpha);
  };
  if (work >= kSmall) return multiply(0, batches);
  at::parallel_for(0, batches, kSmall / std::max<int64_t>(work, 1) + 1, multiply);
}

}  // namespace

int64_t slices_of_block(int64_t count, int64_t elements, int64_t block) {
  const int64_t fit = std::max<int64_t>(block / std::max<int64_t>(elements, 1), 1);
  const int64_t blocks = (count + fit - 1) / fit;
  return blocks <= 1 ? std::max<int64_t>(count, 1) : (count + blocks - 1) / blocks;
}

// Each thread converts and multiplies a part of `out` by itself: what one thread has converted
// would come slowly to another's cache. All of them convert the factor that they share, which takes
// a hundredth of multiplying.
void multiply_converted(const at::Tensor& out, const at::Tensor& added, const at::Tensor& a,
                        const at::Tensor& b, double beta, double alpha) {
  const int64_t m = a.size(0), k = a.size(1), n = b.size(1);
  if (n > m)
    return multiply_converted(out.t(), added.defined() ? added.t() : added, b.t(), a.t(), beta,
                              alpha);
  const auto compute = k > m ? by_depth : by_rows;
  if (at::in_parallel_region()) return compute(out, added, a, b, beta, alpha);
  const int64_t threads = m * n * k < kSmall ? 1 : at::get_num_threads(),
                down = parts_of(m, kNarrow, threads),
                across = parts_of(n, kNarrow, (threads + down - 1) / down);
  const int64_t rows = (m + down - 1) / down, columns = (n + across - 1) / across;
  // At least two, or torch would multiply the only one with all threads.
  at::parallel_for(0, std::max<int64_t>(down * across, 2), 1, [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;  // which threads do not inherit
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / across * rows, column = i % across * columns;
      const int64_t height = std::min(rows, m - row), width = std::min(columns, n - column);
      if (height <= 0 || width <= 0) continue;
      const auto part = [&](const at::Tensor& whole) {
        return whole.narrow(0, row, height).narrow(1, column, width);
      };
      compute(part(out), added.defined() ? part(added) : added, a.narrow(0, row, height),
              b.narrow(1, column, width), beta, alpha);
    }
  });
}

void multiply_in_float32(const at::Tensor& out, const at::Tensor& summand, const at::Tensor& a,
                         const at::Tensor& b, double beta, double alpha) {
  const bool adds = summand.defined() && beta != 0.0;
  const at::Tensor added = adds ? summand.expand(out.sizes()) : at::Tensor();
  if (a.dim() == 3) return multiply_batches(out, added, a, b, beta, alpha);
  if (uses_loops(a.scalar_type(), a.size(0), b.size(1), a.size(1)) &&
      multiply_by_loops(out, added, a, b, beta, alpha))
    return;
  multiply_converted(out, added, a, b, beta, alpha);
}

}  // namespace amp_mp::products
