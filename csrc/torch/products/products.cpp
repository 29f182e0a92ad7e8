#include "torch/products/products.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <mutex>

namespace amp_mp::products {
namespace {

enum Choice { undecided, native, float32 };

std::atomic<Choice> of_bfloat16{undecided}, of_float16{undecided};

std::atomic<Choice>& chosen(at::ScalarType low) {
  TORCH_CHECK_VALUE(is_low(low), "dtype must be torch.bfloat16 or torch.float16, found ", low);
  return low == at::kBFloat16 ? of_bfloat16 : of_float16;
}

// Once in a process, and for good: torch must not lose kernels that another thread runs.
template <auto... replace>
void replace_kernels(std::initializer_list<c10::DispatchKey> keys) {
  static std::once_flag once;
  std::call_once(once, [&] {
    const SilentOverride silent;
    for (const c10::DispatchKey key : keys) {
      auto* aten = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
      (replace(*aten), ...);
    }
  });
}

}  // namespace

bool in_float32(at::ScalarType low) {
  if (low == at::kBFloat16) return of_bfloat16.load(std::memory_order_relaxed) == float32;
  return low == at::kHalf && of_float16.load(std::memory_order_relaxed) == float32;
}

bool in_float32(at::ScalarType low, int64_t m, int64_t n, int64_t k) {
  const Choice own = low == at::kBFloat16 ? of_bfloat16 : of_float16;
  if (own != native) return own == float32;
  constexpr int64_t kFewest = 4;  // rows, whose weights take longer to read than to multiply
  return m <= kFewest || n <= kFewest || !is_large(m, n, k);
}

using c10::DispatchKey;

void fuse_norms() {
  replace_kernels<replace_norms>({DispatchKey::CPU});
  replace_kernels<replace_rms_norm>({DispatchKey::AutogradCPU, DispatchKey::CPU});
}

void choose(at::ScalarType low, bool in_float32) {
  std::atomic<Choice>& own = chosen(low);
  fuse_norms();
  replace_kernels<replace_embeddings, replace_products>({DispatchKey::CPU});
  if (in_float32) {
    replace_kernels<replace_convolution, replace_attention, replace_recurrent_layers>(
        {DispatchKey::CPU});
    replace_kernels<replace_recurrent>({DispatchKey::AutogradCPU, DispatchKey::CPU});
  }
  own = in_float32 ? float32 : native;
}

std::string choice(at::ScalarType low) {
  static constexpr std::array names = {"undecided", "native", "float32"};
  return names[chosen(low)];
}

std::pair<double, double> seconds_of_product(at::ScalarType low, int64_t n, int64_t least_runs,
                                             double limit_s) {
  const auto options = at::TensorOptions().dtype(low);
  const at::Tensor a = at::zeros({n, n}, options), b = at::zeros({n, n}, options);
  at::Tensor out = at::empty({n, n}, options);
  using Clock = std::chrono::steady_clock;
  const auto seconds = [](Clock::time_point from) {
    return std::chrono::duration<double>(Clock::now() - from).count();
  };
  std::pair<double, double> least(INFINITY, INFINITY);
  const auto measure = [&] {
    const auto begin = Clock::now();
    for (int64_t run = 0; run < least_runs || (run < 20 && seconds(begin) < limit_s); ++run) {
      const auto first = Clock::now();
      at::cpu::mm_out(out, a, b);
      least.first = std::min(least.first, seconds(first));
      const auto second = Clock::now();
      multiply_in_float32(out, {}, a, b, 0.0, 1.0);
      least.second = std::min(least.second, seconds(second));
    }
  };
  // Inside a parallel region a product takes one thread. Several wait for one another for
  // milliseconds where other processes use the cores, and either product may look the faster one.
  at::parallel_for(0, 2, 1, [&](int64_t begin, int64_t) {
    if (begin == 0) measure();
  });
  return least;
}

}  // namespace amp_mp::products
