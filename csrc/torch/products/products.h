#pragma once
// Products of low-precision tensors on a CPU that multiplies float32 faster: computed in float32
// and stored in low precision ("pseudo float32"). The kernels take the place of torch's own below
// autograd, so that forward and backward passes, hooks, checkpointing, torch.func and compiled
// graphs use them alike; while a dtype is not in float32 they call torch's kernels.
#include <torch/library.h>

#include "torch/checks.h"

namespace amp_mp::products {

// While it lives, torch does not warn that a kernel is overridden, which is intended.
struct SilentOverride : c10::WarningHandler {
  void process(const c10::Warning&) override {}
  const c10::WarningUtils::WarningHandlerGuard guard{this};
};

// Whether all products of a dtype, bfloat16 or float16, are computed in float32.
bool in_float32(at::ScalarType low);

// Whether that of [m, k] and [k, n] is: after a choice of native the small ones are.
bool in_float32(at::ScalarType low, int64_t m, int64_t n, int64_t k);

// Chooses that for the process. The first choice replaces torch's kernels on the CPU of mm, addmm,
// bmm, baddbmm, layer and RMS norms and the gradients of embeddings, the first one of float32 also
// those of convolution, attention and recurrent layers, and of their derivatives.
void choose(at::ScalarType low, bool in_float32);

// Replaces torch's layer norms of low-precision tensors and gives `_fused_rms_norm` kernels on the
// CPU; a choice does it, too.
void fuse_norms();

// "native", "float32", or "undecided" before the first choice.
std::string choice(at::ScalarType low);

// Seconds of a product of n x n matrices of a dtype on one thread, native and in float32: the least
// of those that end within a time, of so many runs at least.
std::pair<double, double> seconds_of_product(at::ScalarType low, int64_t n, int64_t least_runs,
                                             double limit_s);

// out = beta * summand + alpha * (a @ b) for low-precision matrices, or for batches of them;
// summand, undefined or of a shape that expands to out's, has the same dtype.
void multiply_in_float32(const at::Tensor& out, const at::Tensor& summand, const at::Tensor& a,
                         const at::Tensor& b, double beta, double alpha);

// Whether a native bfloat16 product of [m, k] and [k, n] is faster than a float32 one and than
// `multiply_by_loops`.
bool is_large(int64_t m, int64_t n, int64_t k);

// The same product of matrices by the CPU loops, which convert weights in registers and read them
// once for 16 rows. False, and nothing is done, if another product is faster or b is dense in
// neither dimension.
bool multiply_by_loops(const at::Tensor& out, const at::Tensor& summand, const at::Tensor& a,
                       const at::Tensor& b, double beta, double alpha);

// Elements of a block that is converted at a time: 1 MiB in float32, which stays in the cache.
constexpr int64_t kBlock = int64_t(1) << 18;

// How many of `count` slices, each of some number of elements, make a block; at least one.
int64_t slices_of_block(int64_t count, int64_t elements, int64_t block = kBlock);

// Put kernels in the place of torch's; `aten` registers for the dispatch key CPU, for
// `replace_recurrent` and `replace_rms_norm` for AutogradCPU too.
void replace_products(torch::Library& aten);
void replace_convolution(torch::Library& aten);
void replace_attention(torch::Library& aten);
void replace_embeddings(torch::Library& aten);
void replace_norms(torch::Library& aten);
void replace_rms_norm(torch::Library& aten);
void replace_recurrent(torch::Library& aten);
void replace_recurrent_layers(torch::Library& aten);

}  // namespace amp_mp::products
