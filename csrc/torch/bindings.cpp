// What Python sees. Arguments are unpacked with the GIL held, everything else runs without it.
#include "cpu/kernels.h"
#include "torch/apex/amp_c.h"
#include "torch/bind.h"
#include "torch/build_facts.h"
#include "torch/casting/cast_cache.h"
#include "torch/casting/kept_casts.h"
#include "torch/casting/trace.h"
#include "torch/ops.h"
#include "torch/products/products.h"
#include "torch/python/unpack.h"
#include "torch/step/steps.h"

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
  m.def("check_weights", &check_weights, py::arg("weights"), py::arg("names"));

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
  m.def(
      "measure",
      [](const py::sequence& tensors) {
        const Tensors list = unpack(tensors, "tensors");
        const py::gil_scoped_release release;
        return measure(list);
      },
      py::arg("tensors"));
  m.def(
      "used_on_current_stream",
      [](const py::sequence& tensors) {
        for (const at::Tensor& t : unpack(tensors, "tensors")) used_on_current_stream(t);
      },
      py::arg("tensors"));
  m.def("combine", [](const at::Tensor& rows) { return combine(rows); }, py::arg("rows"));
  m.def(
      "copy_",
      [](const py::sequence& to, const py::sequence& from, const std::optional<at::Tensor>& verdict,
         double multiplier, bool saturate) {
        const Tensors targets = unpack(to, "to"), sources = unpack(from, "from");
        const py::gil_scoped_release release;
        copy_(targets, sources, verdict, multiplier, saturate);
      },
      py::arg("to"), py::arg("from_"), py::kw_only(), py::arg("verdict") = py::none(),
      py::arg("multiplier") = 1.0, py::arg("saturate") = false);
  bind_average(m);
  m.def("update_scale_", &update_scale_, py::arg("update"), py::arg("found_inf"),
        py::arg("max_abs") = py::none(), py::arg("reports") = py::none(),
        py::call_guard<py::gil_scoped_release>());

  bind_main_grad(m);
  bind_nested_backward(m);

  auto p = m.def_submodule("products");
  using Times = std::map<std::string, std::map<std::string, double>>;  // by shape and way
  p.def(
      "choose",
      [](at::ScalarType low, const std::string& products, const Times& times) {
        const auto of = [&](size_t shape) {
          const auto& own = times.at(products::kShapes[shape].name);
          return products::Seconds{own.at("native"), own.at("loops"), own.at("converted")};
        };
        products::choose(low, products, {of(0), of(1), of(2), of(3)});
      },
      py::arg("dtype"), py::arg("products"), py::arg("seconds"));
  py::dict work;  // multiplications of each shape
  for (const auto& [name, batches, m, n, k] : products::kShapes) work[name] = batches * m * n * k;
  py::setattr(p, "work", work);
  p.def("choice", &products::choice, py::arg("dtype"));
  p.def("ways", &products::ways, py::arg("dtype"));
  p.def(
      "measure",
      [](at::ScalarType low) {
        const auto [few_rows, square, tall, batch] = products::measure(low);
        Times times;
        const products::Shape* shape = products::kShapes;
        for (const auto& [native, loops, converted] : {few_rows, square, tall, batch})
          times[(shape++)->name] = {{"native", native}, {"loops", loops}, {"converted", converted}};
        return times;
      },
      py::arg("dtype"), py::call_guard<py::gil_scoped_release>());
  p.def("fuse_norms", &products::fuse_norms);

  auto c = m.def_submodule("casting");
  casting::bind_policies(c);
  casting::bind_step_guard(c);
  using ReleaseGil = py::call_guard<py::gil_scoped_release>;
  c.def("clear_cache", &casting::clear, ReleaseGil());
  c.def("set_keeps_casts", &casting::set_keeps_casts, py::arg("keep"));
  c.def("optimizer_stepped", &casting::optimizer_stepped, ReleaseGil());
  c.def("cached", [] {
    py::dict rows;
    for (const auto& [tensor, copy] : casting::cached()) rows[py::cast(tensor)] = copy;
    return rows;
  });
  c.def("set_trace", [](int mode) { casting::set_trace(casting::Trace(mode)); }, py::arg("mode"));
  c.def("take_log", &casting::take_log);
}
