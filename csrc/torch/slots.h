#pragma once
// The tensors an optimizer updates on one device: checked when they are gathered, then only looked
// at again where memory has moved. A step hands in nothing but gradients.
#include <string>
#include <vector>

#include "plan.h"
#include "torch/checks.h"

namespace amp_mp {

class Slots {
 public:
  // One element a parameter in each list. masters[i]: float32, or undefined where the rule is to
  // update params[i] itself. states: one list per state of the rule, and how each is stored.
  // clocks: float64 of 3 elements (core/rules.h, Clock). groups: ascending indices into the step's
  // hypers. names: for messages.
  Slots(Tensors params, Tensors masters, std::vector<Tensors> states, std::vector<Format> formats,
        Tensors clocks, std::vector<int64_t> groups, std::vector<std::string> names);

  int64_t size() const { return int64_t(params_.size()); }
  at::Device device() const { return device_; }
  int64_t groups() const { return groups_.empty() ? 0 : groups_.back() + 1; }
  int states() const { return int(states_.size()); }

  // The parameters' gradients as they are now, undefined where there is none.
  Tensors grads() const;
  const std::vector<std::string>& names() const { return names_; }

  // The slots of the parameters with a gradient. A gradient of another layout than its parameter's
  // is copied to `kept`, which has to outlive the slots' use. A float32 parameter whose
  // low-precision copy autocast has cached gets it as its weight: the step writes both.
  std::vector<Slot> plan(Tensors& kept);

  // After the slots of plan() have been written, or not been: counts the writes.
  void finish(bool written);

 private:
  void check() const;
  void remember();
  void prefetch(int64_t near, int64_t far) const;
  static uint64_t shape_of(const at::Tensor& param);  // dtype, sizes and strides, mixed
  template <class F>
  void for_each_tensor(int64_t i, const F& f) const;

  Tensors params_, masters_, clocks_;
  std::vector<Tensors> states_;
  std::vector<Format> formats_;
  std::vector<int64_t> groups_;
  std::vector<std::string> names_;
  at::Device device_;
  // What check() saw, to notice what has moved since.
  std::vector<uint64_t> shapes_;     // of every parameter
  std::vector<const void*> memory_;  // of every tensor
  std::vector<Slot> slots_;          // of every parameter, without its gradient
  Tensors copies_;                   // cached casts that the step under way writes
};

}  // namespace amp_mp
