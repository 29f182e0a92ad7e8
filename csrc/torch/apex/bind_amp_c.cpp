// amp_C as Python sees it, _C.amp_C: names and order of the arguments are Apex's.
#include "torch/apex/amp_c.h"

namespace amp_mp::apex {
namespace {

constexpr const char* kModule = R"(Apex's functions over lists of tensors, by the native passes.

chunk_size has no effect. noop_flag, int32 [1], becomes 1 where an input is inf or NaN, and is never
cleared; the host does not wait for it. tensor_lists: lists of float32, float16 or bfloat16 tensors,
also mixed in a list, dense in any layout, and all on one device; results that share memory
otherwise than as a whole are a ValueError. Computed in float32 and rounded once; empty lists and
tensors are skipped. ValueError where lists differ in length or shapes, before anything is written.
)";

}  // namespace

void bind_amp_c(py::module_& m) {
  bind_larc(m);
  bind_clipping(m);
  py::module_ a = m.def_submodule("amp_C", kModule);
  bind_passes(a);
  bind_steps(a);
  py::list names;
  for (const auto& [name, function] : py::dict(a.attr("__dict__")))
    if (py::isinstance<py::function>(function)) names.append(name);
  a.attr("__all__") = names;
}

}  // namespace amp_mp::apex
