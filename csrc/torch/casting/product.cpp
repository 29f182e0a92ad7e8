#include "torch/casting/product.h"

#include <algorithm>
#include <cmath>

#include "torch/products/products.h"

namespace amp_mp::casting {
namespace {

using c10::IValue;

constexpr int kRows = 12, kEven = 12, kRagged = 6;
constexpr int16_t never = 0x7fff;

// The depth K from which bfloat16 is faster, for M = 1, 2, 4, ... rows and N columns. Measured on
// an AMD Zen 5 (AVX512-BF16), torch 2.13, one thread; `benchmarks/products.py --calibrate` measures
// it again. Ragged N, no multiple of 4, have a table of their own, because float32 is slower for
// them.
constexpr int16_t kEvenTable[kRows][kEven] = {
    // N = 1, 2, 4, ..., 2048
    {never, never, never, never, never, never, never, never, never, never, never, never},
    {never, never, never, never, never, never, never, never, 1536, 768, 256, 128},
    {never, never, never, never, never, never, 2048, 2048, 1024, 512, 256, 128},
    {never, never, never, never, never, never, 2048, 1024, 768, 384, 192, 96},
    {never, never, never, never, never, never, 2048, 1024, 512, 192, 128, 64},
    {never, never, never, never, never, never, 2048, 512, 256, 128, 64, 48},
    {never, never, never, never, never, 1536, 1024, 256, 128, 48, 48, 2},
    {never, never, never, never, never, 768, 384, 192, 96, 48, 2, 2},
    {never, never, never, never, never, 384, 192, 96, 32, 2, 2, 2},
    {never, never, never, 256, never, 192, 64, 32, 12, 2, 2, 2},
    {never, never, never, 96, 192, 96, 32, 12, 2, 2, 2, 2},
    {never, never, never, 2, 96, 48, 12, 2, 2, 2, 2, 2},
};
constexpr float kRaggedColumns[kRagged] = {3, 6, 11, 23, 45, 91};
constexpr int16_t kRaggedTable[kRows][kRagged] = {
    {never, never, never, never, never, never},
    {never, never, never, never, never, never},
    {never, never, never, never, never, 2048},
    {never, never, never, never, never, 1024},
    {never, never, never, never, 2048, 1024},
    {never, never, never, 1024, 768, 512},
    {never, never, 1024, 768, 384, 256},
    {never, never, 512, 256, 192, 128},
    {never, 1536, 192, 128, 128, 64},
    {never, 384, 96, 96, 48, 24},
    {never, 96, 4, 32, 24, 12},
    {never, 3, 2, 16, 8, 2},
};
// Smaller products M * N * K are never faster; the check saves most small products the logarithms.
constexpr int64_t kLeastWork = 32768;

// A position between two rows or columns of a table.
struct TablePosition {
  int index;
  float fraction;
};

TablePosition between_powers(int64_t size, int count) {
  const float log = std::log2(float(size));
  const int index = std::min(int(log), count - 2);
  return {index, std::min(log - float(index), 1.0f)};
}

TablePosition between_ragged(int64_t size) {
  int index = 0;
  while (index < kRagged - 2 && float(size) >= kRaggedColumns[index + 1]) ++index;
  const float low = std::log2(kRaggedColumns[index]), high = std::log2(kRaggedColumns[index + 1]);
  return {index, std::clamp((std::log2(float(size)) - low) / (high - low), 0.0f, 1.0f)};
}

// Log2 of the table's K at a position, interpolated linearly in the logarithms of M and N.
template <int Columns>
float threshold(const int16_t (&table)[kRows][Columns], TablePosition row, TablePosition column) {
  const auto log = [&](int r, int c) { return std::log2(float(table[r][c])); };
  const auto along = [&](int r) {
    return (1 - column.fraction) * log(r, column.index) +
           column.fraction * log(r, column.index + 1);
  };
  return (1 - row.fraction) * along(row.index) + row.fraction * along(row.index + 1);
}

bool is_large(int64_t m, int64_t n, int64_t k) {
  if (m <= 1 || n <= 1 || k <= 0 || m * n * k < kLeastWork) return false;
  const TablePosition row = between_powers(m, kRows);
  const bool ragged = n % 4 != 0 && n < kRaggedColumns[kRagged - 1] && n > 4;
  const float from = ragged ? threshold(kRaggedTable, row, between_ragged(n))
                            : threshold(kEvenTable, row, between_powers(n, kEven));
  constexpr float kRounding = 0.15f;  // tolerance of the interpolation
  return std::log2(float(k)) + kRounding >= from;
}

bool is_symbolic(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

// While torch.compile traces with unknown sizes: finds the number of rows from which the answer is
// yes, and guards on rows >= that number, so that the graph is valid for all sizes with the same
// answer.
bool has_many_rows(const c10::SymInt& m, int64_t n, int64_t k) {
  int64_t small = 1, large = int64_t(1) << (kRows - 1);  // the last row counts for larger M too
  if (!is_large(large, n, k)) return false;
  while (large - small > 1) {
    const int64_t middle = (small + large) / 2;
    (is_large(middle, n, k) ? large : small) = middle;
  }
  return m.sym_ge(large).guard_bool(__FILE__, __LINE__);
}

bool is_large_symbolic(const at::Tensor& left, const at::Tensor& right, bool transposed) {
  if (left.dim() == 0 || right.dim() < 2) return false;
  const auto sizes = right.sym_sizes();
  const size_t last = sizes.size() - 1;
  // A weight's sizes are usually known; if not, the graph is specialised to the current ones.
  const int64_t n = sizes[transposed ? last - 1 : last].guard_int(__FILE__, __LINE__);
  const int64_t k = sizes[transposed ? last : last - 1].guard_int(__FILE__, __LINE__);
  if (k == 0) return false;
  return has_many_rows(left.sym_numel() / k, n, k);
}

bool is_plain_tensor(const c10::Argument& argument) {
  return argument.type()->kind() == c10::TypeKind::TensorType &&
         !(argument.alias_info() && argument.alias_info()->isWrite() && argument.is_out());
}

}  // namespace

Operands operands_of(const c10::FunctionSchema& schema) {
  Operands found;
  found.arguments = int(schema.arguments().size());
  const std::string base = schema.name().substr(schema.name().find("::") + 2);
  found.transposed = base == "linear" || base.ends_with("_cell");
  for (int i = 0; i < found.arguments; ++i) {
    const c10::Argument& argument = schema.arguments()[size_t(i)];
    if (!is_plain_tensor(argument)) continue;
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
  if (is_symbolic(left) || is_symbolic(right)) return is_large_symbolic(left, right, transposed);
  if (left.dim() == 0 || right.dim() < 2 || left.numel() == 0) return false;
  const c10::IntArrayRef sizes = right.sizes();
  const int64_t n = transposed ? sizes[sizes.size() - 2] : sizes.back();
  if (left.numel() * n < kLeastWork) return false;
  const int64_t k = left.sizes().back();
  return is_large(left.numel() / k, n, k);  // batches are rows
}

bool is_faster(at::ScalarType low, const Operands& operands, const torch::jit::Stack& stack) {
  const IValue* arguments = &stack[stack.size() - size_t(operands.arguments)];
  return is_faster(low, arguments[operands.left].toTensor(), arguments[operands.right].toTensor(),
                   operands.transposed);
}

}  // namespace amp_mp::casting
