#pragma once
// Products of low-precision tensors on a CPU that multiplies float32 faster: computed in float32
// and stored in low precision ("pseudo float32"). The kernels take the place of torch's own below
// autograd, so that forward and backward passes, hooks, checkpointing, torch.func and compiled
// graphs use them alike; while a dtype is not in float32 they call torch's kernels.
#include <torch/library.h>

#include <algorithm>
#include <map>
#include <string>

#include "torch/checks.h"

namespace amp_mp::products {

// While it lives, torch does not warn that a kernel is overridden, which is intended.
struct SilentOverride : c10::WarningHandler {
  void process(const c10::Warning&) override {}
  const c10::WarningUtils::WarningHandlerGuard guard{this};
};

// Seconds of a product of low-precision tensors on one thread: by torch's kernel for the dtype, by
// the CPU loops, and by torch's float32 product of converted blocks. Infinite: not tried.
struct Seconds {
  double native, loops, converted;
};

// The seconds of each kind of shape, in the order of kShapes. `square` stands for smaller matrices
// with many rows and columns, `tall` for larger ones; `batch` has small matrices.
struct Measured {
  Seconds few_rows, square, tall, batch;
};

struct Shape {
  const char* name;
  int64_t batches, m, n, k;
};
constexpr Shape kShapes[] = {{"few rows", 1, 8, 512, 512},
                             {"square", 1, 64, 64, 64},
                             {"tall", 1, 512, 128, 256},
                             {"batch", 16, 64, 64, 64}};

// Measures the ways on this processor: for each shape the least CPU time of one thread in runs that
// take turns, at most 30 ms in all. Leaves torch's kernels unchanged.
Measured measure(at::ScalarType low);

// Whether products of a dtype, bfloat16 or float16, are computed in float32: all of them, and
// convolution, attention and recurrent layers with them.
bool in_float32(at::ScalarType low);

// Whether the product of [m, k] and [k, n] is: small ones are even after a choice of native.
bool in_float32(at::ScalarType low, int64_t m, int64_t n, int64_t k);

// Whether the loops compute such a product in float32; if not, torch does, on converted blocks.
bool uses_loops(at::ScalarType low, int64_t m, int64_t n, int64_t k);

// Chooses for the process. products: "native" or "float32" for all that the loops do not take, or
// "auto", the faster one. The first choice replaces torch's kernels on the CPU of mm, addmm, bmm,
// baddbmm, layer and RMS norms and the gradients of embeddings, the first one of float32 also those
// of convolution, attention and recurrent layers, and of their derivatives.
void choose(at::ScalarType low, const std::string& products, const Measured& measured);

// Replaces torch's layer norms of low-precision tensors and gives `_fused_rms_norm` kernels on the
// CPU; a choice does it, too.
void fuse_norms();

// "native", "float32", or "undecided" before the first choice.
std::string choice(at::ScalarType low);

// The way of each kind of measured shape, by its name; and whether convolution, attention and
// recurrent layers are "native" or in "float32".
std::map<std::string, std::string> ways(at::ScalarType low);

// out = beta * summand + alpha * (a @ b) for low-precision matrices, or for batches of them;
// summand, undefined or of a shape that expands to out's, has the same dtype.
void multiply_in_float32(const at::Tensor& out, const at::Tensor& summand, const at::Tensor& a,
                         const at::Tensor& b, double beta, double alpha);

// Whether a native product of [m, k] and [k, n] is faster than one in float32, by the measurements
// of the latest choice.
bool is_large(at::ScalarType low, int64_t m, int64_t n, int64_t k);

// The same by the table of another processor (sizes.cpp): on this one native products are faster
// from `later` times the depth on.
bool is_large(int64_t m, int64_t n, int64_t k, double later);

// Up to so many rows, or columns, the loops convert weights in registers and read them once.
constexpr int64_t kFewRows = 16;

// The product of matrices, or of batches of them, by the CPU loops; summand is undefined or has
// out's shape. False, and nothing is done, if b is dense in neither dimension.
bool multiply_by_loops(const at::Tensor& out, const at::Tensor& summand, const at::Tensor& a,
                       const at::Tensor& b, double beta, double alpha);

// The same for matrices, by torch's float32 product of converted blocks.
void multiply_converted(const at::Tensor& out, const at::Tensor& summand, const at::Tensor& a,
                        const at::Tensor& b, double beta, double alpha);

// Elements of a converted block: 1 MiB in float32, which stays in the cache.
constexpr int64_t kBlock = int64_t(1) << 18;

// How many of `count` slices, each of some number of elements, make a block; at least one.
int64_t slices_of_block(int64_t count, int64_t elements, int64_t block = kBlock);

// Parts of rows or columns, at most `most`, with at least `least` of them each.
inline int64_t parts_of(int64_t size, int64_t least, int64_t most) {
  return std::clamp<int64_t>(size / least, 1, most);
}

// These replace kernels of torch. `aten` registers for the dispatch key CPU, in `replace_recurrent`
// and `replace_rms_norm` for AutogradCPU.
void replace_products(torch::Library& aten);
void replace_convolution(torch::Library& aten);
void replace_attention(torch::Library& aten);
void replace_embeddings(torch::Library& aten);
void replace_norms(torch::Library& aten);
void replace_rms_norm(torch::Library& aten);
void replace_recurrent(torch::Library& aten);
void replace_recurrent_layers(torch::Library& aten);

}  // namespace amp_mp::products
