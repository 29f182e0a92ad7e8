// Backward passes inside of another, as reentrant checkpoints start them.
#include <torch/csrc/autograd/graph_task.h>

#include <cstring>
#include <typeinfo>

#include "torch/bind.h"
#include "torch/torch_versions.h"

namespace amp_mp {
namespace {

using torch::autograd::GraphTask;
using torch::autograd::Node;
using torch::autograd::PyNode;

// The backward pass that this thread works for; null outside of one. torch tells a member's address
// alone.
const GraphTask* current_pass() {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (!nodes) return nullptr;
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"  // no standard layout, and no base with data
  constexpr size_t kOffset = offsetof(GraphTask, nodes_in_graph_);
#pragma GCC diagnostic pop
  const auto* pass =
      reinterpret_cast<const GraphTask*>(reinterpret_cast<const char*>(nodes) - kOffset);
  TORCH_INTERNAL_ASSERT(pass->id_ == uint64_t(torch::autograd::get_current_graph_task_id()));
  return pass;
}

// Its typeinfo is no symbol of libtorch_python that others see.
bool is_python_function(const Node& node) {
  return std::strcmp(typeid(node).name(), "N5torch8autograd6PyNodeE") == 0;
}

// The classes of the Python functions in the graph of the backward pass that this thread works for.
py::set autograd_functions() {
  py::set kinds;
  if (const GraphTask* pass = current_pass())
    for (const Node* node : pass->nodes_in_graph_) {
      if (!is_python_function(*node)) continue;
      if (PyObject* object = object_of(static_cast<const PyNode&>(*node)))
        kinds.add(py::handle(reinterpret_cast<PyObject*>(Py_TYPE(object))));
    }
  return kinds;
}

}  // namespace

void bind_nested_backward(py::module_& m) {
  m.def("is_nested_backward", [] {
    const GraphTask* pass = current_pass();
    return pass && pass->reentrant_depth_ > 0;
  });
  m.def("autograd_functions", &autograd_functions);
}

}  // namespace amp_mp
