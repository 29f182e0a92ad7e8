#pragma once
// What differs between the versions of torch that this folder is compiled for, 2.11 to 2.15. For
// Python amp_mp/torch_versions.py has it. Anything else is the same in all of them.
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace amp_mp {

// What holds a node of autograd's graph: a shared_ptr before torch 2.13, then an intrusive_ptr.
using NodePointer = decltype(torch::autograd::Edge::function);

template <class Made, class Pointer = NodePointer, class... Given>
Pointer make_node(Given&&... given) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return Pointer(new Made(std::forward<Given>(given)...), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<Made>(std::forward<Given>(given)...);
  }
}

// The object of a Python function's node, borrowed: a member before torch 2.13, then a method.
template <class Function>
PyObject* object_of(const Function& node) {
  if constexpr (requires { node.obj; })
    return node.obj;
  else
    return node.pyobj();
}

}  // namespace amp_mp
