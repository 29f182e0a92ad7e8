// What each way to multiply takes on this processor: measured, because neither its vendor nor its
// instructions tell how fast MKL, oneDNN and the loops are on it.
#include <ATen/Parallel.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/zeros.h>
#include <time.h>

#include <algorithm>
#include <cmath>

#include "torch/products/products.h"

namespace amp_mp::products {
namespace {

// Time of the thread, not of the clock: other processes on its core do not count.
double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// How often a shape runs; after kLimit seconds only until kLeastRuns.
constexpr int kMostRuns = 20, kLeastRuns = 3;
constexpr double kLimit = 3e-3;
// If a native product of few rows takes so many times as long as in float32, the processor emulates
// the instructions, and other shapes are not worth the time. Smaller products say nothing: oneDNN
// takes that long before their first multiplication.
constexpr double kHopeless = 8;

// The least time of each way for a shape, in runs that take turns.
Seconds measure_shape(at::ScalarType low, const Shape& shape, bool try_native) {
  const auto of = [&](int64_t rows, int64_t columns) {
    const auto options = at::TensorOptions().dtype(low);
    return shape.batches == 1 ? at::zeros({rows, columns}, options)
                              : at::zeros({shape.batches, rows, columns}, options);
  };
  const at::Tensor a = of(shape.m, shape.k), b = of(shape.k, shape.n);
  at::Tensor out = of(shape.m, shape.n);
  const bool is_batch = shape.batches > 1;
  Seconds least{INFINITY, INFINITY, INFINITY};
  const auto run = [](double& least, const auto& multiply) {
    const double begin = thread_seconds();
    multiply();
    least = std::min(least, thread_seconds() - begin);
  };
  const double begin = thread_seconds();
  for (int i = 0; i < kMostRuns && (i < kLeastRuns || thread_seconds() - begin < kLimit); ++i) {
    run(least.loops, [&] { multiply_by_loops(out, {}, a, b, 0.0, 1.0); });
    run(least.converted, [&] {
      if (!is_batch) return multiply_converted(out, {}, a, b, 0.0, 1.0);
      for (int64_t j = 0; j < shape.batches; ++j)
        multiply_converted(out[j], {}, a[j], b[j], 0.0, 1.0);
    });
    if (!try_native) continue;
    run(least.native, [&] { is_batch ? at::cpu::bmm_out(out, a, b) : at::cpu::mm_out(out, a, b); });
    if (i > 0) try_native = least.native <= kHopeless * least.loops;
  }
  return least;
}

}  // namespace

Measured measure(at::ScalarType low) {
  TORCH_CHECK_VALUE(is_low(low), "dtype must be torch.bfloat16 or torch.float16, found ", low);
  Measured found{};
  // Inside a parallel region a product takes one thread. Several wait for one another for
  // milliseconds where other processes use the cores, and any way may look the fastest.
  at::parallel_for(0, 2, 1, [&](int64_t begin, int64_t) {
    if (begin != 0) return;
    const auto& [few_rows, square, tall, batch] = kShapes;
    found.few_rows = measure_shape(low, few_rows, true);
    const bool may_pay = found.few_rows.native <= kHopeless * found.few_rows.loops;
    found.square = measure_shape(low, square, may_pay);
    found.tall = measure_shape(low, tall, may_pay);
    found.batch = measure_shape(low, batch, may_pay);
  });
  return found;
}

}  // namespace amp_mp::products
