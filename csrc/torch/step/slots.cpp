#include "torch/step/slots.h"

#include <ATen/ops/empty_strided.h>

#include "torch/casting/kept_casts.h"
#include "torch/device.h"
#include "torch/muon/orthogonalise.h"

namespace amp_mp {

namespace {

// Between two steps a model's tensors leave the CPU's cache, and reading one is a chain of cache
// misses: prefetching makes a step of many small tensors a third faster.
void prefetch_impl(const at::Tensor& t) {
  constexpr int64_t kImplBytes = 192;  // the part of a TensorImpl that is read
  const char* impl = reinterpret_cast<const char*>(t.unsafeGetTensorImpl());
  for (int64_t line = 0; line < kImplBytes; line += 64) __builtin_prefetch(impl + line);
}

}  // namespace

Slots::Slots(Lists lists)
    : own_(std::move(lists)),
      shards_(std::move(own_.dtensors), own_.params, own_.names),
      device_(device_of(own_)) {
  check_lengths();
  check();
  remember();
}

// Calls f in a fixed order: parameter, master, states, scales, clock; skips undefined ones.
template <class F>
void Slots::for_each_tensor(int64_t i, const F& f) const {
  f(own_.params[i]);
  if (own_.masters[i].defined()) f(own_.masters[i]);
  for (const Tensors& s : own_.states) f(s[i]);
  for (const Tensors& s : own_.scales)
    if (s[i].defined()) f(s[i]);
  f(own_.clocks[i]);
}

uint64_t Slots::shape_of(const at::Tensor& param) {
  auto mixed = uint64_t(param.scalar_type()) * 31 + uint64_t(param.device().index());
  for (int64_t d = 0; d < param.dim(); ++d)
    mixed = (mixed * 31 + uint64_t(param.size(d))) * 31 + uint64_t(param.stride(d));
  return mixed;
}

void Slots::remember() {
  shapes_.clear();
  memory_.clear();
  slots_.clear();
  for (int64_t i = 0; i < size(); ++i) {
    Slot s = {};
    const at::Tensor& param = own_.params[i];
    s.size = param.numel();
    s.master = master_of(size_t(i));
    for (size_t k = 0; k < own_.states.size(); ++k) {
      const at::Tensor& scales = own_.scales[k][i];
      s.state[k] = {own_.states[k][i].mutable_data_ptr(), own_.formats[k][i],
                    scales.defined() ? scales.mutable_data_ptr() : nullptr};
    }
    s.clock = reinterpret_cast<Clock*>(own_.clocks[i].mutable_data_ptr<double>());
    s.group = int32_t(own_.groups[i]);
    s.tensor_index = uint32_t(own_.tensor_indices[i]);
    s.origin = {own_.firsts[i], own_.row_lengths[i], own_.row_strides[i]};
    s.row = i;
    slots_.push_back(s);
    shapes_.push_back(shape_of(param));
    for_each_tensor(i, [&](const at::Tensor& t) { memory_.push_back(t.const_data_ptr()); });
  }
}

Array Slots::master_of(size_t i) const {
  const at::Tensor &param = own_.params[i], &master = own_.masters[i];
  if (!master.defined()) {
    Format format = check_format(param, {"the weight"});
    if (own_.stochastic[i] && format != Format::float32)
      format =
          format == Format::bfloat16 ? Format::bfloat16_stochastic : Format::float16_stochastic;
    return {param.mutable_data_ptr(), format};
  }
  const bool is_whole = master.scalar_type() == at::kFloat;
  const at::Tensor &data = is_whole ? master : param, &rest = is_whole ? param : master;
  return {data.mutable_data_ptr(), *format_of_master(param, master), rest.mutable_data_ptr()};
}

std::vector<Reading> Slots::weights() {
  shards_.check_found(own_.names);
  follow_memory();
  std::vector<Reading> readings(own_.params.size());
  for (size_t i = 0; i < readings.size(); ++i)
    if (gradient(i).defined()) readings[i] = {own_.params[i].numel(), master_of(i)};
  return readings;
}

std::vector<int64_t> Slots::offsets() const { return muon::direction_offsets(own_.params); }

Tensors Slots::grads() const {
  shards_.check_found(own_.names);
  Tensors grads;
  grads.reserve(own_.params.size());
  for (size_t i = 0; i < own_.params.size(); ++i) grads.push_back(gradient(i));
  return grads;
}

bool Slots::fit() const {
  constexpr int64_t kAhead = 16;
  for (int64_t i = 0; i < size(); ++i) {
    if (i + kAhead < size()) prefetch_impl(own_.params[i + kAhead]);
    if (shape_of(own_.params[i]) != shapes_[i]) return false;
  }
  return shards_.are(own_.params);
}

void Slots::prefetch(int64_t near, int64_t far) const {
  if (near < size())
    for_each_tensor(near, [](const at::Tensor& t) {
      __builtin_prefetch(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    });
  if (far < size()) for_each_tensor(far, prefetch_impl);
}

// Checks the tensors again whose memory has moved.
void Slots::follow_memory() {
  size_t at = 0;
  bool moved = false;
  for (int64_t i = 0; i < size(); ++i) {
    prefetch(i + 2, i + 4);
    for_each_tensor(i, [&](const at::Tensor& t) {
      moved = moved || t.const_data_ptr() != memory_[at];
      ++at;
    });
  }
  if (!moved) return;  // by p.data = ..., which is allowed if the checks still pass
  check();
  remember();
  ++moves_;
}

void Slots::find_copies(bool captured) {
  // A CUDA graph must not write copies that the cache may free, and its replays advance no version
  // counters.
  if (captured) casting::never_cache(own_.params);
  copies_ = captured ? Tensors(own_.params.size()) : casting::copies_to_write(own_.params);
  for (size_t i = 0; shards_.any() && i < copies_.size(); ++i)
    if (shards_.has(i)) copies_[i].reset();  // DTensors are never cached
}

const std::vector<Slot>& Slots::plan(Tensors& kept, std::vector<Reading>* readings) {
  shards_.check_found(own_.names);
  follow_memory();
  const bool captured = is_capturing(device_);
  find_copies(captured);
  if (readings) readings->assign(own_.params.size(), Reading{});
  has_gradient_.assign(own_.params.size(), true);
  kept.reserve(3 * own_.params.size());  // pointers into it stay good
  bool all_as_remembered = true;
  for (int64_t i = 0; i < size(); ++i) {
    const at::Tensor& param = own_.params[i];
    const at::Tensor* grad = &gradient(size_t(i));
    if (!grad->defined()) {
      const bool frozen =
          !(shards_.has(size_t(i)) ? shards_.dtensor(size_t(i)) : param).requires_grad();
      TORCH_CHECK_VALUE(
          !captured || frozen, "amp_mp: ", own_.names[size_t(i)],
          " has no gradient, and a step captured now would leave it out of every replay; ",
          "capture after a backward pass that reaches it, or freeze it");
      copies_[size_t(i)].reset();
      slots_[size_t(i)].grad = {};
      has_gradient_[size_t(i)] = false;
      all_as_remembered = false;
      continue;
    }
    const auto label = [&] { return Label{"the gradient", i, &own_.names[size_t(i)]}; };
    if (grad->_is_zerotensor()) grad = &kept.emplace_back(with_memory(*grad));
    check_gradient(i, *grad);
    if (readings) {  // in the gradient's own order, which is the order of sums
      const bool dense = grad->is_non_overlapping_and_dense();
      if (!dense) kept.push_back(grad->contiguous());
      (*readings)[size_t(i)] = {grad->numel(), array_of(dense ? *grad : kept.back(), label())};
    }
    if (!same_layout(*grad, param) || grad->is_neg()) {
      kept.push_back(
          at::empty_strided(param.sizes(), param.strides(), grad->options()).copy_(*grad));
      grad = &kept.back();
    }
    slots_[size_t(i)].grad = array_of(*grad, label());
    all_as_remembered = all_as_remembered && !writes_copy(size_t(i));
  }
  if (all_as_remembered) return slots_;  // without copying 200 bytes per parameter
  chosen_.clear();
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (!has_gradient_[i]) continue;
    chosen_.push_back(slots_[i]);
    if (writes_copy(i)) chosen_.back().copy = array_of(copies_[i], {"a cached cast"});
  }
  return chosen_;
}

bool Slots::writes_copy(size_t i) const {
  return copies_[i].defined() && !own_.masters[i].defined();
}

void Slots::finish(bool written) {
  for (size_t i = 0; written && i < own_.params.size(); ++i) {
    if (!has_gradient_[i]) continue;
    bump_version(own_.params[i]);
    if (shards_.has(i)) bump_version(shards_.dtensor(i));
  }
  shards_.drop_gradients();
  casting::copies_written(own_.params, copies_);
  copies_.clear();  // now only the cache holds them
}

}  // namespace amp_mp
