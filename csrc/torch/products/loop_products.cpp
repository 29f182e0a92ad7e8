// Products by the CPU loops (cpu/multiply.h, cpu/multiply_blocks.h).
#include <ATen/Parallel.h>

#include <algorithm>

#include "cpu/kernels.h"
#include "torch/products/products.h"

namespace amp_mp::products {
namespace {

// Multiplications, rows and columns of a thread's part, at least.
constexpr int64_t kPart = int64_t(1) << 18, kPartRows = 48, kPartColumns = 64;

int64_t rounded_up(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

// A matrix of the loops, or the first of a batch; `step` is the way from one to the next.
struct Stepped {
  Matrix matrix;
  int64_t step;

  explicit Stepped(const at::Tensor& t)
      : matrix(t.defined() ? Matrix{t.const_data_ptr(), t.stride(-2), t.stride(-1)} : Matrix{}),
        step(t.defined() && t.dim() == 3 ? t.stride(0) : 0) {}
  // Elements further on; no matrix stays none.
  Matrix moved(int64_t elements) const {
    const auto* data = static_cast<const c10::Half*>(matrix.data);
    return {data ? data + elements : data, matrix.row, matrix.column};
  }
  Matrix of_batch(int64_t i) const { return moved(i * step); }
  Matrix from_row(int64_t row) const { return moved(row * matrix.row); }
};

void transpose(Stepped& s) { std::swap(s.matrix.row, s.matrix.column); }

// The factors, the summand and the result of a product whose rows are few rather than its columns,
// or else stored in a row.
struct LoopProduct {
  int64_t rows, columns, depth;
  Stepped a, b, c, to;
  Product first;  // of the batch

  LoopProduct(const at::Tensor& out, const at::Tensor& summand, const at::Tensor& x,
              const at::Tensor& y, double beta, double alpha)
      : rows(x.size(-2)), columns(y.size(-1)), depth(x.size(-1)), a(x), b(y), c(summand), to(out) {
    const bool few = std::min(rows, columns) <= kFewRows;
    if (few ? columns < rows : to.matrix.column != 1 && to.matrix.row == 1) {
      std::swap(rows, columns);
      std::swap(a, b);
      for (Stepped* each : {&a, &b, &c, &to}) transpose(*each);
    }
    first = {check_format(x, {"tensor"}),
             rows,
             columns,
             depth,
             a.matrix,
             b.matrix,
             c.matrix,
             to.matrix,
             float(alpha),
             float(beta)};
  }
  bool fits() const { return b.matrix.row == 1 || b.matrix.column == 1; }
  int64_t work() const { return rows * columns * depth; }
};

// By columns, and where these are too few by rows as well.
void multiply_matrix(const LoopProduct& whole) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), whole.work() / kPart + 1),
                across = parts_of(whole.columns, kPartColumns, threads),
                down = parts_of(whole.rows, kPartRows, (threads + across - 1) / across);
  const int64_t columns = rounded_up((whole.columns + across - 1) / across, kPartColumns / 2),
                rows = (whole.rows + down - 1) / down;
  at::parallel_for(0, down * across, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / across * rows, column = i % across * columns;
      if (row >= whole.rows || column >= whole.columns) continue;
      Product part = whole.first;
      part.rows = std::min(rows, whole.rows - row);
      part.a = whole.a.from_row(row);
      part.c = whole.c.from_row(row);
      part.to = whole.to.from_row(row);
      cpu::kernels()->multiply(part, column, std::min(whole.columns, column + columns));
    }
  });
}

void multiply_batch(const LoopProduct& all, int64_t batches) {
  const int64_t grain = kPart / std::max<int64_t>(all.work(), 1) + 1;
  at::parallel_for(0, batches, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Product one = all.first;
      one.a = all.a.of_batch(i);
      one.b = all.b.of_batch(i);
      one.c = all.c.of_batch(i);
      one.to = all.to.of_batch(i);
      cpu::kernels()->multiply(one, 0, one.columns);
    }
  });
}

}  // namespace

bool multiply_by_loops(const at::Tensor& out, const at::Tensor& summand, const at::Tensor& a,
                       const at::Tensor& b, double beta, double alpha) {
  const LoopProduct product(out, summand, a, b, beta, alpha);
  if (!product.fits()) return false;
  if (a.dim() == 3)
    multiply_batch(product, a.size(0));
  else
    multiply_matrix(product);
  return true;
}

}  // namespace amp_mp::products
