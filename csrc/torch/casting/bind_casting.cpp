// What Python sees of casting: the operators' policies, the cache of casts, and the log of casts.
#include "torch/bind.h"
#include "torch/casting/cast_cache.h"
#include "torch/casting/kept_casts.h"
#include "torch/casting/trace.h"

namespace amp_mp::casting {
namespace {

py::dict cached_copies() {
  py::dict rows;
  for (const auto& [tensor, copy] : cached()) rows[py::cast(tensor)] = copy;
  return rows;
}

}  // namespace

void bind(py::module_& m) {
  auto c = m.def_submodule("casting");
  bind_policies(c);
  bind_step_guard(c);
  using ReleaseGil = py::call_guard<py::gil_scoped_release>;
  c.def("clear_cache", &clear, ReleaseGil());
  c.def("set_keeps_casts", &set_keeps_casts, py::arg("keep"));
  c.def("optimizer_stepped", &optimizer_stepped, ReleaseGil());
  c.def("cached", &cached_copies);
  c.def("set_trace", [](int mode) { set_trace(Trace(mode)); }, py::arg("mode"));
  c.def("take_log", &take_log);
}

}  // namespace amp_mp::casting
