#include "torch/slots.h"

#include <ATen/ops/empty_strided.h>

#include "torch/cast_cache.h"

namespace amp_mp {
namespace {

void check_length(size_t found, size_t wanted, const char* argument) {
  TORCH_CHECK_VALUE(found == wanted, "amp_mp: ", argument, " has ", found,
                    " elements, but there are ", wanted, " parameters");
}

at::ScalarType dtype_of(Format format) {
  switch (format) {
    case Format::float32: return at::kFloat;
    case Format::bfloat16: return at::kBFloat16;
    default: return at::kHalf;
  }
}

}  // namespace

Slots::Slots(Tensors params, Tensors masters, std::vector<Tensors> states,
             std::vector<Format> formats, Tensors clocks, std::vector<int64_t> groups,
             std::vector<std::string> names)
    : params_(std::move(params)),
      masters_(std::move(masters)),
      clocks_(std::move(clocks)),
      states_(std::move(states)),
      formats_(std::move(formats)),
      groups_(std::move(groups)),
      names_(std::move(names)),
      device_(params_.empty() ? at::Device(at::kCPU) : params_[0].device()) {
  check_length(masters_.size(), params_.size(), "masters");
  check_length(clocks_.size(), params_.size(), "clocks");
  check_length(groups_.size(), params_.size(), "groups");
  check_length(names_.size(), params_.size(), "names");
  for (const Tensors& s : states_) check_length(s.size(), params_.size(), "a list of states");
  TORCH_CHECK_VALUE(formats_.size() == states_.size(), "amp_mp: ", states_.size(), " states, but ",
                    formats_.size(), " formats");
  TORCH_CHECK_VALUE(states_.size() <= size_t(kMaxStates), "amp_mp: ", states_.size(),
                    " states, at most ", kMaxStates, " are supported");
  for (size_t i = 1; i < groups_.size(); ++i)
    TORCH_CHECK_VALUE(groups_[i] >= groups_[i - 1], "amp_mp: groups must ascend");
  check();
  remember();
}

// In one fixed order: parameter, master, states, clock; undefined masters left out.
template <class F>
void Slots::for_each_tensor(int64_t i, const F& f) const {
  f(params_[i]);
  if (masters_[i].defined()) f(masters_[i]);
  for (const Tensors& s : states_) f(s[i]);
  f(clocks_[i]);
}

void Slots::check() const {
  std::vector<std::pair<at::Tensor, Label>> written;
  for (int64_t i = 0; i < size(); ++i) {
    const Label param{"the weight", i, &names_[i]}, master{"the master", i, &names_[i]},
        state{"the state", i, &names_[i]}, clock{"the step count", i, &names_[i]};
    const auto check_like_param = [&](const at::Tensor& t, Format format, const Label& label) {
      check_writable(t, label);
      check_device(t, device_, label);
      check_dtype(t, dtype_of(format), label);
      check_same_layout(t, params_[i], label, param);
      written.emplace_back(t, label);
    };
    check_writable(params_[i], param);
    check_device(params_[i], device_, param);
    check_format(params_[i], param);
    written.emplace_back(params_[i], param);
    if (masters_[i].defined()) check_like_param(masters_[i], Format::float32, master);
    for (size_t k = 0; k < states_.size(); ++k) check_like_param(states_[k][i], formats_[k], state);
    check_writable(clocks_[i], clock);
    check_device(clocks_[i], device_, clock);
    check_dtype(clocks_[i], at::kDouble, clock);
    TORCH_CHECK_VALUE(clocks_[i].numel() == 3 && clocks_[i].is_contiguous(),
                      "amp_mp: ", clock.text(), " must hold 3 contiguous numbers, found ",
                      describe(clocks_[i]));
    written.emplace_back(clocks_[i], clock);
  }
  check_no_overlap(written);
}

uint64_t Slots::shape_of(const at::Tensor& param) {
  auto mixed = uint64_t(param.scalar_type());
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
    s.size = params_[i].numel();
    const Span param = {params_[i].mutable_data_ptr(),
                        check_format(params_[i], {"the weight", i, &names_[i]})};
    if (masters_[i].defined()) {
      s.weight = param;
      s.master = {masters_[i].mutable_data_ptr(), Format::float32};
    } else {
      s.master = param;
    }
    for (size_t k = 0; k < states_.size(); ++k)
      s.state[k] = {states_[k][i].mutable_data_ptr(), formats_[k]};
    s.clock = reinterpret_cast<Clock*>(clocks_[i].mutable_data_ptr<double>());
    s.group = int32_t(groups_[i]);
    slots_.push_back(s);
    shapes_.push_back(shape_of(params_[i]));
    for_each_tensor(i, [&](const at::Tensor& t) { memory_.push_back(t.const_data_ptr()); });
  }
}

Tensors Slots::grads() const {
  Tensors grads;
  grads.reserve(params_.size());
  for (const at::Tensor& param : params_) grads.push_back(param.grad());
  return grads;
}

// Between two steps a model's tensors have left the cache, and each look at one is a chain of
// misses: asking ahead takes a third off the cost of a step of many small tensors.
void Slots::prefetch(int64_t near, int64_t far) const {
  constexpr int64_t kImplBytes = 192;  // the part of a TensorImpl that is read
  if (near < size())
    for_each_tensor(near, [](const at::Tensor& t) {
      __builtin_prefetch(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    });
  if (far < size())
    for_each_tensor(far, [](const at::Tensor& t) {
      const char* impl = reinterpret_cast<const char*>(t.unsafeGetTensorImpl());
      for (int64_t line = 0; line < kImplBytes; line += 64) __builtin_prefetch(impl + line);
    });
}

std::vector<Slot> Slots::plan(Tensors& kept) {
  size_t at = 0;
  bool moved = false;
  for (int64_t i = 0; i < size(); ++i) {
    prefetch(i + 2, i + 4);
    moved = moved || shape_of(params_[i]) != shapes_[i];
    for_each_tensor(i, [&](const at::Tensor& t) {
      moved = moved || t.const_data_ptr() != memory_[at];
      ++at;
    });
  }
  if (moved) {  // p.data = ..., model.to(...): legal, if what is there now fits together
    if (!params_.empty()) device_ = params_[0].device();
    check();
    remember();
  }
  copies_ = casting::copies_to_write(params_);
  std::vector<Slot> slots;
  slots.reserve(params_.size());
  kept.reserve(params_.size());  // pointers into it stay good
  for (int64_t i = 0; i < size(); ++i) {
    const at::Tensor& param = params_[i];
    const at::Tensor* grad = &param.grad();
    if (!grad->defined()) {
      copies_[size_t(i)].reset();
      continue;
    }
    const auto label = [&] { return Label{"the gradient", i, &names_[i]}; };
    if (is_subclass(*grad) || grad->layout() != at::kStrided) check_plain(*grad, label());
    if (grad->device() != device_) check_device(*grad, device_, label());
    if (grad->sizes() != param.sizes())
      check_same_layout(*grad, param, label(), {"the weight", i, &names_[i]});
    if (!same_layout(*grad, param) || grad->is_neg()) {
      kept.push_back(
          at::empty_strided(param.sizes(), param.strides(), grad->options()).copy_(*grad));
      grad = &kept.back();
    }
    slots.push_back(slots_[size_t(i)]);
    slots.back().grad = span_of(*grad, label());
    if (copies_[size_t(i)].defined() && !masters_[size_t(i)].defined())
      slots.back().weight = span_of(copies_[size_t(i)], label());
  }
  return slots;
}

void Slots::finish(bool written) {
  if (written)
    for (int64_t i = 0; i < size(); ++i)
      if (params_[i].grad().defined()) for_each_tensor(i, bump_version);
  casting::copies_written(params_, copies_);
  copies_.clear();  // to be held by the cache alone again
}

}  // namespace amp_mp
