// Recurrent layers in float32: torch's own float32 layer on converted weights, once a call, so that
// gates, cells and the sums of the weights' gradients are float32 and each output is rounded once.
#include <ATen/TensorOperators.h>
#include <ATen/ops/gru_cell_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/gru_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/gru_ops.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/lstm_cell_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/lstm_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/lstm_ops.h>
#include <ATen/ops/mkldnn_rnn_layer_backward_cpu_dispatch.h>
#include <ATen/ops/mkldnn_rnn_layer_cpu_dispatch.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rnn_relu_cell_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/rnn_relu_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/rnn_tanh_cell_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/rnn_tanh_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/tanh.h>

#include "torch/products/products.h"

namespace amp_mp::products {
namespace {

using at::Tensor;
using at::TensorList;
using MaybeTensor = std::optional<Tensor>;

// Arguments or results, those of dtype `from` in dtype `to`.
struct Converted {
  at::ScalarType from, to;

  Tensor operator()(const Tensor& t) const {
    return t.defined() && t.scalar_type() == from ? t.to(to) : t;
  }
  MaybeTensor operator()(const MaybeTensor& t) const { return t ? (*this)(*t) : t; }
  std::vector<Tensor> operator()(TensorList list) const {
    std::vector<Tensor> converted;
    for (const Tensor& t : list) converted.push_back((*this)(t));
    return converted;
  }
  template <class... T>
  std::tuple<T...> operator()(const std::tuple<T...>& all) const {
    return std::apply([&](const T&... t) { return std::tuple<T...>((*this)(t)...); }, all);
  }
  at::IntArrayRef operator()(at::IntArrayRef sizes) const { return sizes; }
  template <class Number>
  Number operator()(Number n) const {
    return n;
  }
};

// An operator whose arguments begin with the input. Layers are above autograd, which records the
// conversions, so that a gradient is rounded once, too; oneDNN's layers are below it.
template <class Schema>
struct Layer;
template <class Result, class... Args>
struct Layer<Result(const Tensor&, Args...)> {
  template <Result (*stock)(const Tensor&, Args...)>
  static Result compute(const Tensor& input, Args... args) {
    const at::ScalarType low = input.scalar_type();
    if (!in_float32(low)) return stock(input, args...);
    const Converted up{low, at::kFloat}, down{at::kFloat, low};
    return down(stock(up(input), up(args)...));
  }
};

// The factor of a cell's second product; undefined for a list that torch refuses.
Tensor hidden_of(const Tensor& h) { return h; }
Tensor hidden_of(TensorList h) { return h.size() == 2 ? h[0] : Tensor(); }

// A cell is called for every element of a sequence, so backward does not keep its weights in
// float32: both products are rounded, and the formula after them is computed in float32.
template <auto stock, auto formula, class Hidden>
auto cell(const Tensor& x, Hidden h, const Tensor& w_ih, const Tensor& w_hh,
          const MaybeTensor& b_ih, const MaybeTensor& b_hh) {
  const at::ScalarType low = x.scalar_type();
  const Tensor hidden = hidden_of(h);
  if (!in_float32(low) || !hidden.defined()) return stock(x, h, w_ih, w_hh, b_ih, b_hh);
  const Converted down{at::kFloat, low};
  return down(formula(at::linear(x, w_ih, b_ih).to(at::kFloat),
                      at::linear(hidden, w_hh, b_hh).to(at::kFloat), h));
}

std::tuple<Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, TensorList h) {
  const auto gates = (input + hidden).chunk(4, -1);
  const Tensor kept = gates[1].sigmoid() * h[1].to(at::kFloat),
               next = kept + gates[0].sigmoid() * gates[2].tanh();
  return {gates[3].sigmoid() * next.tanh(), next};
}

Tensor gru_cell(const Tensor& of_input, const Tensor& of_hidden, const Tensor& h) {
  const auto input = of_input.chunk(3, -1), hidden = of_hidden.chunk(3, -1);
  const Tensor fresh = (input[2] + (input[0] + hidden[0]).sigmoid() * hidden[2]).tanh();
  return (h.to(at::kFloat) - fresh) * (input[1] + hidden[1]).sigmoid() + fresh;
}

template <Tensor (*activation)(const Tensor&)>
Tensor rnn_cell(const Tensor& input, const Tensor& hidden, const Tensor&) {
  return activation(input + hidden);
}

}  // namespace

void replace_recurrent(torch::Library& aten) {
  namespace stock = at::compositeimplicitautograd;
  // Of padded sequences, and of packed ones, whose second argument is the batch sizes.
  aten.impl("lstm.input", Layer<at::_ops::lstm_input::schema>::compute<stock::lstm>);
  aten.impl("lstm.data", Layer<at::_ops::lstm_data::schema>::compute<stock::lstm>);
  using Padded = Layer<at::_ops::gru_input::schema>;
  using Packed = Layer<at::_ops::gru_data::schema>;
  aten.impl("gru.input", Padded::compute<stock::gru>);
  aten.impl("gru.data", Packed::compute<stock::gru>);
  aten.impl("rnn_tanh.input", Padded::compute<stock::rnn_tanh>);
  aten.impl("rnn_tanh.data", Packed::compute<stock::rnn_tanh>);
  aten.impl("rnn_relu.input", Padded::compute<stock::rnn_relu>);
  aten.impl("rnn_relu.data", Packed::compute<stock::rnn_relu>);
  aten.impl("lstm_cell", cell<stock::lstm_cell, lstm_cell, TensorList>);
  aten.impl("gru_cell", cell<stock::gru_cell, gru_cell, const Tensor&>);
  aten.impl("rnn_tanh_cell", cell<stock::rnn_tanh_cell, rnn_cell<at::tanh>, const Tensor&>);
  aten.impl("rnn_relu_cell", cell<stock::rnn_relu_cell, rnn_cell<at::relu>, const Tensor&>);
}

void replace_recurrent_layers(torch::Library& aten) {
  aten.impl("mkldnn_rnn_layer",
            Layer<decltype(at::cpu::mkldnn_rnn_layer)>::compute<at::cpu::mkldnn_rnn_layer>);
  aten.impl("mkldnn_rnn_layer_backward",
            Layer<decltype(at::cpu::mkldnn_rnn_layer_backward)>::compute<
                at::cpu::mkldnn_rnn_layer_backward>);
}

}  // namespace amp_mp::products
