#include "torch/step/slots.h"

#include <c10/util/hash.h>

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

Array written(const ArrayTensors& t) {
  return {t.data.mutable_data_ptr(), t.format,
          t.second.defined() ? t.second.mutable_data_ptr() : nullptr};
}

}  // namespace

Slots::Slots(std::vector<SlotTensors> own, const at::Device& device)
    : own_(std::move(own)), device_(device), watched_(watched_so_far()) {
  std::vector<Shard> shards;
  for (const SlotTensors& each : own_) {
    params_.push_back(each.param);
    shards.push_back({each.dtensor, each.name});
  }
  shards_ = Shards(std::move(shards));
  check();
  remember();
}

// Calls f in a fixed order: parameter, master, states, scales, clock; skips undefined ones.
template <class F>
void Slots::for_each_tensor(int64_t i, const F& f) const {
  const SlotTensors& own = own_[size_t(i)];
  f(own.param);
  if (own.master.defined()) f(own.master);
  for (const ArrayTensors& s : own.states) f(s.data);
  for (const ArrayTensors& s : own.states)
    if (s.second.defined()) f(s.second);
  f(own.clock);
}

size_t Slots::shape_of(const at::Tensor& param) {
  size_t hash = c10::hash_combine(size_t(param.scalar_type()), size_t(param.device().index()));
  for (const at::IntArrayRef numbers : {param.sizes(), param.strides()})
    for (const int64_t number : numbers) hash = c10::hash_combine(hash, size_t(number));
  return hash;
}

void Slots::remember() {
  checked_ = {};
  for (int64_t i = 0; i < size(); ++i) {
    Slot s = {};
    const SlotTensors& own = own_[size_t(i)];
    s.size = own.param.numel();
    s.master = master_of(size_t(i));
    if (device_.is_cpu() && own.record) s.sum = own.record->sum_of_step();
    for (size_t k = 0; k < own.states.size(); ++k) s.state[k] = written(own.states[k]);
    s.clock = reinterpret_cast<Clock*>(own.clock.mutable_data_ptr<double>());
    s.group = int32_t(own.group);
    s.tensor_index = uint32_t(own.tensor_index);
    s.origin = own.origin;
    s.row = i;
    checked_.slots.push_back(s);
    checked_.shapes.push_back(shape_of(own.param));
    for_each_tensor(i, [&](const at::Tensor& t) { checked_.memory.push_back(t.const_data_ptr()); });
  }
}

Array Slots::master_of(size_t i) const {
  const at::Tensor &param = own_[i].param, &master = own_[i].master;
  if (!master.defined()) {
    Format format = check_format(param, {"the weight"});
    if (own_[i].stochastic && format != Format::float32)
      format =
          format == Format::bfloat16 ? Format::bfloat16_stochastic : Format::float16_stochastic;
    return {param.mutable_data_ptr(), format};
  }
  return written(*master_in(param, master));
}

std::vector<Reading> Slots::weights() {
  shards_.check_found();
  follow_memory();
  std::vector<Reading> readings(own_.size());
  for (size_t i = 0; i < readings.size(); ++i)
    if (gradient(i).defined()) readings[i] = {params_[i].numel(), master_of(i)};
  return readings;
}

std::vector<int64_t> Slots::offsets() const { return muon::direction_offsets(params_); }

Tensors Slots::grads() const {
  shards_.check_found();
  Tensors grads;
  grads.reserve(own_.size());
  for (size_t i = 0; i < own_.size(); ++i) grads.push_back(gradient(i));
  return grads;
}

bool Slots::fit() const {
  if (watched_ != watched_so_far()) return false;
  constexpr int64_t kAhead = 16;
  for (int64_t i = 0; i < size(); ++i) {
    if (i + kAhead < size()) {
      prefetch_impl(params_[i + kAhead]);
      __builtin_prefetch(own_[size_t(i + kAhead)].record.get());
    }
    if (shape_of(params_[i]) != checked_.shapes[i]) return false;
    const SlotTensors& own = own_[size_t(i)];
    if (own.record && !own.record->master().is_same(own.master)) return false;
  }
  return shards_.are(params_);
}

void Slots::prefetch(int64_t near, int64_t far) const {
  if (near < size())
    for_each_tensor(near, [](const at::Tensor& t) {
      __builtin_prefetch(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    });
  if (far < size()) for_each_tensor(far, prefetch_impl);
}

// Checks all tensors again if the memory of one has moved.
void Slots::follow_memory() {
  size_t at = 0;
  bool moved = false;
  for (int64_t i = 0; i < size(); ++i) {
    prefetch(i + 2, i + 4);
    for_each_tensor(i, [&](const at::Tensor& t) {
      moved = moved || t.const_data_ptr() != checked_.memory[at];
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
  if (captured) casting::never_cache(params_);
  planned_.copies = captured ? Tensors(own_.size()) : casting::copies_to_write(params_);
  for (size_t i = 0; shards_.any() && i < planned_.copies.size(); ++i)
    if (shards_.has(i)) planned_.copies[i].reset();  // DTensors are never cached
}

void Slots::find_changes(bool captured) {
  planned_.noted.clear();
  if (watched_ == 0) return;
  for (size_t i = 0; i < own_.size(); ++i) {
    checked_.slots[i].changes = {};
    const std::shared_ptr<WeightChanges> changes = own_[i].changes.lock();
    // A capture cannot copy the notes to the weight's device; then all of it counts as changed.
    if (!changes || (captured && changes->memory().device() != device_)) continue;
    if (!changes->follow(params_[i])) continue;
    if (captured) changes->keep();
    used_on_current_stream(changes->memory());
    checked_.slots[i].changes = changes->changes();
    planned_.noted.push_back(changes);
  }
}

const std::vector<Slot>& Slots::plan(Tensors& kept, std::vector<Reading>* readings) {
  shards_.check_found();
  follow_memory();
  const bool captured = is_capturing(device_);
  find_copies(captured);
  find_changes(captured);
  if (readings) readings->assign(own_.size(), Reading{});
  planned_.has_gradient.assign(own_.size(), true);
  kept.reserve(3 * own_.size());  // pointers into it stay good
  bool all_as_remembered = true;
  for (int64_t i = 0; i < size(); ++i) {
    const at::Tensor& param = params_[i];
    const at::Tensor* grad = &gradient(size_t(i));
    if (!grad->defined()) {
      const bool frozen =
          !(shards_.has(size_t(i)) ? shards_.dtensor(size_t(i)) : param).requires_grad();
      TORCH_CHECK_VALUE(
          !captured || frozen, "amp_mp: ", name(size_t(i)),
          " has no gradient, and a step captured now would leave it out of every replay; ",
          "capture after a backward pass that reaches it, or freeze it");
      planned_.copies[size_t(i)].reset();
      checked_.slots[size_t(i)].grad = {};
      planned_.has_gradient[size_t(i)] = false;
      all_as_remembered = false;
      continue;
    }
    const auto label = [&] { return Label{"the gradient", i, &own_[size_t(i)].name}; };
    if (grad->_is_zerotensor()) grad = &kept.emplace_back(with_memory(*grad));
    check_gradient(i, *grad);
    if (readings) {  // in the gradient's own order, which is the order of sums
      const bool dense = grad->is_non_overlapping_and_dense();
      if (!dense) kept.push_back(grad->contiguous());
      (*readings)[size_t(i)] = {grad->numel(), array_of(dense ? *grad : kept.back(), label())};
    }
    checked_.slots[size_t(i)].grad = array_of(laid_out_as(param, *grad, kept), label());
    all_as_remembered = all_as_remembered && !writes_copy(size_t(i));
  }
  if (all_as_remembered) return checked_.slots;  // without copying 200 bytes per parameter
  planned_.chosen.clear();
  for (size_t i = 0; i < checked_.slots.size(); ++i) {
    if (!planned_.has_gradient[i]) continue;
    planned_.chosen.push_back(checked_.slots[i]);
    if (writes_copy(i))
      planned_.chosen.back().copy = array_of(planned_.copies[i], {"a cached cast"});
  }
  return planned_.chosen;
}

bool Slots::writes_copy(size_t i) const {
  return planned_.copies[i].defined() && !own_[i].master.defined();
}

void Slots::finish(bool written) {
  for (size_t i = 0; written && i < own_.size(); ++i) {
    if (!planned_.has_gradient[i]) continue;
    bump_version(params_[i]);
    const at::Tensor& param = shards_.has(i) ? shards_.dtensor(i) : params_[i];
    if (shards_.has(i)) bump_version(param);
    if (own_[i].record) own_[i].record->stepped(param, params_[i], checked_.slots[i].sum);
  }
  shards_.drop_gradients();
  casting::copies_written(params_, planned_.copies);
  planned_.copies.clear();  // now only the cache holds them
  planned_.noted.clear();
}

}  // namespace amp_mp
