#include "torch/products/products.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>

namespace amp_mp::products {
namespace {

// What a process does with products of one dtype.
struct Choice {
  bool native;  // of large products and of whole layers
  bool few_by_loops, small_by_loops, large_by_loops;
  int64_t fewest_native;  // rows, or columns, of native products, at least
  double later;           // for is_large
};

// Each choice makes a new one; the earlier ones are never freed, as other threads may read them.
std::atomic<const Choice*> of_bfloat16{nullptr}, of_float16{nullptr};

std::atomic<const Choice*>& chosen(at::ScalarType low) {
  TORCH_CHECK_VALUE(is_low(low), "dtype must be torch.bfloat16 or torch.float16, found ", low);
  return low == at::kBFloat16 ? of_bfloat16 : of_float16;
}

// Null before the first choice, and of another dtype.
const Choice* current(at::ScalarType low) {
  if (!is_low(low)) return nullptr;
  return chosen(low).load(std::memory_order_acquire);
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

// Multiplications of the shapes square and tall, and between them where larger products begin: a
// fixed number, so that noise of a measurement moves no product's bits.
constexpr int64_t work(const Shape& s) { return s.m * s.n * s.k; }
constexpr int64_t kSquare = work(kShapes[1]), kTall = work(kShapes[2]);
constexpr int64_t kLargeWork = int64_t(1) << 21;

// In noise the least of many runs is off by a few percent. Within these margins a choice is the
// same each time, and costs as little.
constexpr double kClearly = 1.15, kSlowerNative = 1.1;

bool loops_pay(const Seconds& s) { return s.loops <= kClearly * s.converted; }

double least_in_float32(const Seconds& s) { return std::min(s.loops, s.converted); }

// How many times deeper than in the table of sizes.cpp a product has to be for native ones to pay.
// Both ways take so long to begin and then so long for each multiplication: two shapes give both,
// and where the lines cross. As a power of two, so that noise seldom moves it.
double later_than_table(const Measured& m) {
  constexpr double kTables = 1.5 * (1 << 20);  // multiplications where the table's lines cross
  const auto line = [](double small, double large) {
    const double each = (large - small) / double(kTall - kSquare);
    return std::pair(small - double(kSquare) * each, each);
  };
  const auto [begin, each] = line(m.square.native, m.tall.native);
  const auto [begin32, each32] = line(least_in_float32(m.square), least_in_float32(m.tall));
  if (!(each < each32)) return 1;
  const double crossing = std::max(begin - begin32, 1e-9) / (each32 - each);
  return std::exp2(std::clamp(std::round(std::log2(crossing / kTables)), -3.0, 3.0));
}

Choice choose_by(const Measured& m, const std::string& products) {
  const bool is_native_faster = m.tall.native <= kSlowerNative * least_in_float32(m.tall);
  Choice found{};
  found.native = products == "native" || (products == "auto" && is_native_faster);
  found.few_by_loops = loops_pay(m.few_rows);
  // One answer for a matrix alone and in a batch: Muon's ranks rely on equal bits of both.
  found.small_by_loops = loops_pay(m.square) || loops_pay(m.batch);
  found.large_by_loops = loops_pay(m.tall);
  // With 4 rows, reading the weights takes longer than multiplying, either way.
  found.fewest_native = m.few_rows.native <= least_in_float32(m.few_rows) ? 5 : kFewRows + 1;
  found.later = is_native_faster ? later_than_table(m) : 1;
  return found;
}

}  // namespace

bool in_float32(at::ScalarType low) {
  const Choice* own = current(low);
  return own && !own->native;
}

bool in_float32(at::ScalarType low, int64_t m, int64_t n, int64_t k) {
  const Choice* own = current(low);
  if (!own) return false;
  return !own->native || std::min(m, n) < own->fewest_native || !is_large(m, n, k, own->later);
}

bool is_large(at::ScalarType low, int64_t m, int64_t n, int64_t k) {
  const Choice* own = current(low);
  return is_large(m, n, k, own ? own->later : 1);
}

bool uses_loops(at::ScalarType low, int64_t m, int64_t n, int64_t k) {
  const Choice* own = current(low);
  if (!own) return true;
  if (std::min(m, n) <= kFewRows) return own->few_by_loops;
  return m * n * k < kLargeWork ? own->small_by_loops : own->large_by_loops;
}

using c10::DispatchKey;

void fuse_norms() {
  replace_kernels<replace_norms>({DispatchKey::CPU});
  replace_kernels<replace_rms_norm>({DispatchKey::AutogradCPU, DispatchKey::CPU});
}

void choose(at::ScalarType low, const std::string& products, const Measured& measured) {
  TORCH_CHECK_VALUE(products == "auto" || products == "native" || products == "float32",
                    "products must be auto, native or float32, found ", products);
  std::atomic<const Choice*>& own = chosen(low);
  const auto* made = new Choice(choose_by(measured, products));
  fuse_norms();
  replace_kernels<replace_embeddings, replace_products>({DispatchKey::CPU});
  if (!made->native) {
    replace_kernels<replace_convolution, replace_attention, replace_recurrent_layers>(
        {DispatchKey::CPU});
    replace_kernels<replace_recurrent>({DispatchKey::AutogradCPU, DispatchKey::CPU});
  }
  own.store(made, std::memory_order_release);
}

std::string choice(at::ScalarType low) {
  const Choice* own = chosen(low);
  return !own ? "undecided" : own->native ? "native" : "float32";
}

std::map<std::string, std::string> ways(at::ScalarType low) {
  std::map<std::string, std::string> found{{"layers", choice(low)}};
  for (const auto& [name, batches, m, n, k] : kShapes) {
    std::string& way = found[name];
    if (choice(low) == "undecided")
      way = "undecided";
    else if (!in_float32(low, m, n, k))
      way = "native";
    else
      way = uses_loops(low, m, n, k) ? "loops" : "converted";
  }
  return found;
}

}  // namespace amp_mp::products
