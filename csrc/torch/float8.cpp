// Weights as float8 for samplers (core/float8.h), a tensor at a time.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include "core/float8.h"
#include "cpu/kernels.h"
#include "torch/bind.h"
#include "torch/device.h"

namespace amp_mp {
namespace {

constexpr int64_t kGrain = 4;                 // blocks of a thread's share, at least
constexpr int64_t kGroupGrain = 4 * 128 * 4;  // of those of MXFP8

// The part of matrices [..., rows, columns] that a shard has, which begins in row first_row and
// column first_column of its first block.
Float8 float8_over(const at::Tensor& weight, int64_t first_row, int64_t first_column) {
  const Label label{"weight"};
  check_plain(weight, label);
  TORCH_CHECK_VALUE(weight.dim() >= 2, "amp_mp: weight (", describe(weight),
                    ") must have two dimensions or more");
  TORCH_CHECK_VALUE(weight.is_contiguous() && !weight.is_neg(), "amp_mp: weight (",
                    describe(weight), ") must be contiguous");
  const auto is_in_block = [](int64_t i) { return i >= 0 && i < kFloat8Block; };
  TORCH_CHECK_VALUE(is_in_block(first_row) && is_in_block(first_column),
                    "amp_mp: first_row and first_column must be below ", kFloat8Block, ", found ",
                    first_row, " and ", first_column);
  Float8 f = {};
  const Array array = array_of(weight, label);
  f.weights = array.data;
  f.format = array.format;
  f.rows = weight.size(-2);
  f.columns = weight.size(-1);
  f.matrices = 1;
  for (int64_t d = 0; d < weight.dim() - 2; ++d) f.matrices *= weight.size(d);
  f.first_row = int32_t(first_row);
  f.first_column = int32_t(first_column);
  return f;
}

// One number for each block of a weight.
at::Tensor of_blocks(const Float8& f, const at::Tensor& weight, at::ScalarType dtype) {
  at::DimVector sizes(weight.sizes().begin(), weight.sizes().end());
  if (f.is_mx) {
    sizes.back() /= kFloat8Group;
  } else {
    sizes[sizes.size() - 2] = f.blocks_down();
    sizes.back() = f.blocks_across();
  }
  return at::empty(sizes, weight.options().dtype(dtype));
}

void run(const Float8& f, const at::Device& device) {
  const auto on_cpu = [&] {
    at::parallel_for(0, f.blocks(), f.is_mx ? kGroupGrain : kGrain,
                     [&](int64_t begin, int64_t end) { cpu::kernels()->float8(f, begin, end); });
  };
  on(device, on_cpu, AMP_MP_CUDA(float8(f, stream)));
}

at::Tensor float8_amax(const at::Tensor& weight, int64_t first_row, int64_t first_column) {
  Float8 f = float8_over(weight, first_row, first_column);
  f.pass = Float8Pass::amax;
  const at::Tensor amax = of_blocks(f, weight, at::kFloat);
  f.amax = data_of<float>(amax);
  run(f, weight.device());
  return amax;
}

at::Tensor float8_scales(const at::Tensor& amax, bool is_power) {
  const Label label{"amax"};
  check_plain(amax, label);
  check_dtype(amax, at::kFloat, label);
  TORCH_CHECK_VALUE(amax.is_contiguous(), "amp_mp: amax (", describe(amax), ") must be contiguous");
  Float8 f = {};
  f.pass = Float8Pass::scales;
  f.is_power = is_power;
  const auto scales =
      at::empty(amax.sizes(), amax.options().dtype(is_power ? at::kByte : at::kFloat));
  f.amax = const_cast<float*>(amax.const_data_ptr<float>());
  f.scales = scales.mutable_data_ptr();
  f.matrices = amax.numel();
  f.rows = f.columns = 1;
  run(f, amax.device());
  return scales;
}

std::pair<at::Tensor, at::Tensor> float8_encode(const at::Tensor& weight, bool is_power, bool is_mx,
                                                const std::optional<at::Tensor>& scales,
                                                int64_t first_row, int64_t first_column) {
  Float8 f = float8_over(weight, first_row, first_column);
  f.is_power = is_power;
  f.is_mx = is_mx;
  TORCH_CHECK_VALUE(!is_mx || (is_power && !scales && f.columns % kFloat8Group == 0),
                    "amp_mp: weight (", describe(weight), ") must have rows of a multiple of ",
                    kFloat8Group, ", powers of two for scales, and none given");
  f.pass = scales ? Float8Pass::codes : Float8Pass::whole;
  const at::Tensor own = of_blocks(f, weight, is_power ? at::kByte : at::kFloat);
  if (scales) {
    const Label label{"scales"};
    check_plain(*scales, label);
    check_dtype(*scales, own.scalar_type(), label);
    check_device(*scales, weight.device(), label);
    TORCH_CHECK_VALUE(scales->sizes() == own.sizes() && scales->is_contiguous(), "amp_mp: scales (",
                      describe(*scales), ") must be contiguous, of shape ", own.sizes());
  }
  const at::Tensor codes = at::empty(weight.sizes(), weight.options().dtype(at::kFloat8_e4m3fn));
  f.scales = const_cast<void*>((scales ? *scales : own).const_data_ptr());
  f.codes = static_cast<uint8_t*>(codes.mutable_data_ptr());
  run(f, weight.device());
  return {codes, scales ? *scales : own};
}

}  // namespace

void bind_float8(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> released;
  m.def("float8_amax", &float8_amax, py::arg("weight"), py::arg("first_row") = 0,
        py::arg("first_column") = 0, released);
  m.def("float8_scales", &float8_scales, py::arg("amax"), py::arg("is_power"), released);
  m.def("float8_encode", &float8_encode, py::arg("weight"), py::arg("is_power"), py::arg("is_mx"),
        py::arg("scales") = py::none(), py::arg("first_row") = 0, py::arg("first_column") = 0,
        released);
}

}  // namespace amp_mp
