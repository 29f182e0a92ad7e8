#include "torch/python/functions.h"

#include "torch/bind.h"

namespace amp_mp {
namespace {

// Never freed: at exit the interpreter, which would have to free the functions, may be gone.
const PythonFunctions* bound = nullptr;

void bind_python(const py::kwargs& functions) { bound = new PythonFunctions{functions}; }

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
