// What Python sees. Arguments are unpacked with the GIL held, everything else runs without it.
#include "cpu/kernels.h"
#include "torch/apex/amp_c.h"
#include "torch/bind.h"
#include "torch/build_facts.h"
#include "torch/device.h"
#include "torch/products/products.h"

namespace amp_mp {
namespace {

py::dict build_info() {
  py::dict info;
  info["torch"] = build_facts.torch;
  info["cuda"] = cuda::is_built();
  info["cuda_toolkit"] = build_facts.cuda_toolkit;
  info["cuda_architectures"] = build_facts.cuda_architectures;
  info["commit"] = build_facts.commit;
  info["cpu"] = cpu::kernels()->name;
  info["compiler"] = __VERSION__;
  py::dict of_cpu;
  for (const auto& [name, dtype] : {std::pair("bfloat16", at::kBFloat16), {"float16", at::kHalf}})
    of_cpu[name] = products::ways(dtype);
  info["products"] = of_cpu;
  return info;
}

}  // namespace
}  // namespace amp_mp

PYBIND11_MODULE(_C, m) {
  using namespace amp_mp;
  if (!cpu::kernels())
    throw py::import_error(
        "amp_mp: AMP_MP_CPU must be baseline, avx2 or avx512, supported by this processor and in "
        "this build (AMP_MP_LOOPS=all compiles all three); unset it to let amp_mp choose");
  m.def("build_info", build_info);
  bind_python_functions(m);
  bind_tables(m);
  bind_ops(m);
  bind_average(m);
  bind_float8(m);
  bind_step(m);
  muon::bind(m);
  bind_steps(m);
  bind_state(m);
  bind_edit_block(m);
  bind_gradients(m);
  bind_wrapped_masters(m);
  bind_qk_clip(m);
  bind_larc(m);
  apex::bind_amp_c(m);
  bind_main_grad(m);
  bind_nested_backward(m);
  products::bind(m);
  casting::bind(m);
}
