#include "torch/casting/large_products.h"

#include "torch/products/products.h"

namespace amp_mp::casting {
namespace {

// While torch.compile traces with unknown sizes: finds the number of rows from which the answer is
// yes, and guards on rows >= that number, so that the graph is valid for all sizes with the same
// answer.
bool has_many_rows(at::ScalarType low, const c10::SymInt& m, int64_t n, int64_t k) {
  int64_t small = 1, large = int64_t(1) << 11;  // the table's last row counts for larger M too
  if (!products::is_large(low, large, n, k)) return false;
  while (large - small > 1) {
    const int64_t middle = (small + large) / 2;
    (products::is_large(low, middle, n, k) ? large : small) = middle;
  }
  return m.sym_ge(large).guard_bool(__FILE__, __LINE__);
}

}  // namespace

Operands operands_of(const c10::FunctionSchema& schema) {
  Operands found;
  const std::string base = schema.name().substr(schema.name().find("::") + 2);
  found.transposed = base == "linear" || base.ends_with("_cell");
  for (int i = 0; i < int(schema.arguments().size()); ++i) {
    const c10::Argument& argument = schema.arguments()[size_t(i)];
    if (argument.type()->kind() != c10::TypeKind::TensorType || argument.is_out()) continue;
    if (base.ends_with("_cell")) {  // its largest product is the input's
      if (i == 0) found.left = i;
      if (argument.name() == "w_ih") found.right = i;
    } else {  // the factors are the last two tensors; addmm has a summand before them
      found.left = found.right;
      found.right = i;
    }
  }
  if (found.right < 0) found.left = -1;
  return found;
}

bool is_faster(at::ScalarType low, const at::Tensor& left, const at::Tensor& right,
               bool transposed) {
  if (products::in_float32(low)) return false;
  if (left.dim() == 0 || right.dim() < 2) return false;
  const int64_t columns = transposed ? -2 : -1,
                depth = transposed ? -1 : -2;  // dimensions of right
  if (left.unsafeGetTensorImpl()->has_symbolic_sizes_strides() ||
      right.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    // A weight's sizes are usually known; if not, the graph is specialised to the current ones.
    const int64_t n = right.sym_size(columns).guard_int(__FILE__, __LINE__);
    const int64_t k = right.sym_size(depth).guard_int(__FILE__, __LINE__);
    return k != 0 && has_many_rows(low, left.sym_numel() / k, n, k);
  }
  if (left.numel() == 0) return false;
  const int64_t k = left.sizes().back();
  return products::is_large(low, left.numel() / k, right.size(columns), k);  // batches are rows
}

}  // namespace amp_mp::casting
