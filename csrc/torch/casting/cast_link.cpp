#include "torch/casting/cast_link.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <memory>
#include <string>
#include <type_traits>

namespace amp_mp::casting {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

// The backward of a cast. It saves no tensor.
struct CastBackward : Node {
  explicit CastBackward(const CastKey& k) : key(k) {}
  CastKey key;

  variable_list apply(variable_list&& grads) override {
    if (key.life == Life::iteration) gradient_went_through(key);
    return {grads[0].defined() ? grads[0].to(at::kFloat) : at::Tensor()};
  }
  std::string name() const override { return "AmpCastBackward"; }
};

// shared_ptr or intrusive_ptr, depending on torch's version.
using NodePointer = decltype(torch::autograd::Edge::function);

template <class Pointer>
Pointer make_node(const CastKey& key) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return Pointer(new CastBackward(key), [](auto* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<CastBackward>(key);
  }
}

}  // namespace

// Not by a torch::autograd::Function, which would cost five times as much, for each weight in each
// forward pass.
at::Tensor link(const CastKey& key, const at::Tensor& leaf, const at::Tensor& copy) {
  NodePointer node = make_node<NodePointer>(key);
  node->set_next_edges(torch::autograd::collect_next_edges(leaf));
  at::Tensor linked = copy.detach();
  torch::autograd::set_history(linked, node);
  return linked;
}

}  // namespace amp_mp::casting
