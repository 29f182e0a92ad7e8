#include "torch/python/functions.h"

#include "torch/bind.h"

namespace amp_mp {
namespace {

// Never freed: at exit the interpreter, which would have to free the functions, may be gone.
const PythonFunctions* bound = nullptr;

void bind_python(const py::kwargs& given) {
  const auto named = [&](const char* name) { return py::object(given[name]); };
  bound = new PythonFunctions{.has_sharded_modules = {named("has_sharded_modules")},
                              .is_dtensor = {named("is_dtensor")},
                              .like = {named("like")},
                              .whole = {named("whole")},
                              .part = {named("part")},
                              .part_of_whole = {named("part_of_whole")},
                              .is_placed_as = {named("is_placed_as")},
                              .shards_of = {named("shards_of")},
                              .origin_of = {named("origin_of")},
                              .why_foreign = {named("why_foreign")},
                              .local_gradient = {named("local_gradient")},
                              .refuse_param = {named("refuse_param")},
                              .warn_of_graph = {named("warn_of_graph")},
                              .refuse_lost = {named("refuse_lost")}};
}

}  // namespace

const PythonFunctions& package() {
  TORCH_CHECK(
      bound,
      "amp_mp: the native library needs a Python function before amp_mp/python_functions.py "
      "has bound it; import amp_mp first");
  return *bound;
}

void bind_python_functions(py::module_& m) { m.def("bind_python", &bind_python); }

}  // namespace amp_mp
