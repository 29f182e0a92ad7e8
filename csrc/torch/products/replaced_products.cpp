// mm, addmm, bmm and baddbmm in all their forms: in float32 where that is switched on or the
// product is small, and the arguments are plain; else torch's kernel, which raises torch's errors.
#include <ATen/ExpandUtils.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_cpu_dispatch.h>

#include "torch/products/products.h"

namespace amp_mp::products {
namespace {

using at::Scalar;
using at::Tensor;

bool are_factors(const Tensor& a, const Tensor& b, int64_t dims) {
  const at::ScalarType low = a.scalar_type();
  return is_low(low) && b.scalar_type() == low && a.dim() == dims && b.dim() == dims &&
         a.size(dims - 1) == b.size(dims - 2) && (dims == 2 || a.size(0) == b.size(0)) &&
         a.numel() > 0 && b.numel() > 0 && a.layout() == at::kStrided &&
         b.layout() == at::kStrided &&
         in_float32(low, a.size(dims - 2), b.size(dims - 1), a.size(dims - 1));
}

std::vector<int64_t> sizes_of(const Tensor& a, const Tensor& b) {
  auto sizes = a.sizes().vec();
  sizes.back() = b.size(-1);
  return sizes;
}

bool is_summand(const Tensor& summand, const Tensor& a, const Tensor& b) {
  return summand.scalar_type() == a.scalar_type() && summand.layout() == at::kStrided &&
         at::is_expandable_to(summand.sizes(), sizes_of(a, b));
}

Tensor product(const Tensor& summand, const Tensor& a, const Tensor& b, const Scalar& beta,
               const Scalar& alpha) {
  const Tensor out = at::empty(sizes_of(a, b), a.options());
  multiply_in_float32(out, summand, a, b, beta.toDouble(), alpha.toDouble());
  return out;
}

// Through a new tensor, because `out` may be one of the arguments or overlap itself.
Tensor& product_to(Tensor& out, const Tensor& summand, const Tensor& a, const Tensor& b,
                   const Scalar& beta, const Scalar& alpha) {
  const Tensor found = product(summand, a, b, beta, alpha);
  at::native::resize_output(out, found.sizes());
  return out.copy_(found);
}

bool takes(const Tensor& out, const Tensor& a) { return out.scalar_type() == a.scalar_type(); }

// Each form of an operator, for matrices (dims 2) and batches of them (3). stock: torch's kernel.

template <int dims, auto stock>
Tensor of_two(const Tensor& a, const Tensor& b) {
  return are_factors(a, b, dims) ? product({}, a, b, 0, 1) : stock(a, b);
}

template <int dims, auto stock>
Tensor& of_two_to(const Tensor& a, const Tensor& b, Tensor& out) {
  const bool ours = are_factors(a, b, dims) && takes(out, a);
  return ours ? product_to(out, {}, a, b, 0, 1) : stock(out, a, b);
}

template <int dims, auto stock>
Tensor added(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta,
             const Scalar& alpha) {
  const bool ours = are_factors(a, b, dims) && is_summand(c, a, b);
  return ours ? product(c, a, b, beta, alpha) : stock(c, a, b, beta, alpha);
}

template <int dims, auto stock>
Tensor& added_to(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta,
                 const Scalar& alpha, Tensor& out) {
  const bool ours = are_factors(a, b, dims) && is_summand(c, a, b) && takes(out, a);
  return ours ? product_to(out, c, a, b, beta, alpha) : stock(out, c, a, b, beta, alpha);
}

template <int dims, auto stock>
Tensor& added_in_place(Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta,
                       const Scalar& alpha) {
  const bool ours = are_factors(a, b, dims) && is_summand(c, a, b) && c.sizes() == sizes_of(a, b);
  return ours ? product_to(c, c, a, b, beta, alpha) : stock(c, a, b, beta, alpha);
}

}  // namespace

void replace_products(torch::Library& aten) {
  aten.impl("mm", of_two<2, at::cpu::mm>);
  aten.impl("mm.out", of_two_to<2, at::cpu::mm_out>);
  aten.impl("bmm", of_two<3, at::cpu::bmm>);
  aten.impl("bmm.out", of_two_to<3, at::cpu::bmm_out>);
  aten.impl("addmm", added<2, at::cpu::addmm>);
  aten.impl("addmm.out", added_to<2, at::cpu::addmm_out>);
  aten.impl("addmm_", added_in_place<2, at::cpu::addmm_>);
  aten.impl("baddbmm", added<3, at::cpu::baddbmm>);
  aten.impl("baddbmm.out", added_to<3, at::cpu::baddbmm_out>);
  aten.impl("baddbmm_", added_in_place<3, at::cpu::baddbmm_>);
}

}  // namespace amp_mp::products
