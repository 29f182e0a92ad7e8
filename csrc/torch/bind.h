#pragma once
// The functions that add to the Python module; each file binds what it defines.
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace amp_mp {

void bind_python_functions(py::module_& m);
void bind_tables(py::module_& m);
void bind_ops(py::module_& m);
void bind_average(py::module_& m);
void bind_float8(py::module_& m);
void bind_qk_clip(py::module_& m);
void bind_larc(py::module_& m);
void bind_main_grad(py::module_& m);
void bind_nested_backward(py::module_& m);
void bind_step(py::module_& m);   // statistics, loss scales, reports
void bind_steps(py::module_& m);  // the whole step
void bind_state(py::module_& m);
void bind_rule_table(py::module_& m);
void bind_weights(py::module_& m);
void bind_loans(py::module_& m);
void bind_weight_changes(py::module_& m);
void bind_looks(py::module_& m);
void bind_restore(py::module_& m);
void bind_edit_block(py::module_& m);
void bind_gradients(py::module_& m);
void bind_wrapped_masters(py::module_& m);
namespace muon {
void bind(py::module_& m);
}
namespace products {
void bind(py::module_& m);
}
namespace casting {
void bind(py::module_& m);
void bind_policies(py::module_& m);
void bind_step_guard(py::module_& m);
}  // namespace casting

}  // namespace amp_mp
