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
  // One element a parameter in each list.
  struct Lists {
    Tensors params;
    // float32 masters, int16 or int8 remainders of masters split with the parameter
    // (core/splits.h), or undefined where the rule is to update the parameter itself.
    Tensors masters;
    std::vector<Tensors> states;               // a list per state of the rule
    Tensors scales;                            // of states[0] where it is m8, undefined elsewhere
    std::vector<std::vector<Format>> formats;  // of the states, as `states`
    std::vector<bool> stochastic;              // whether a parameter without master is rounded so
    Tensors clocks;                            // float64 of 4 elements (core/rules/base.h, Clock)
    std::vector<int64_t> groups;               // ascending indices into the step's hypers
    std::vector<int64_t> numbers;              // of the tensors, for their random bits
    std::vector<int64_t>
        firsts;  // where a parameter's element 0 lies in the tensor it is a part of
    std::vector<std::string> names;  // for messages
  };
  explicit Slots(Lists lists);

  int64_t size() const { return int64_t(own_.params.size()); }
  at::Device device() const { return device_; }
  int64_t groups() const { return own_.groups.empty() ? 0 : own_.groups.back() + 1; }
  int states() const { return int(own_.states.size()); }

  // The parameters' gradients as they are now, undefined where there is none.
  Tensors grads() const;
  // What the rule updates, as float32 numbers to read; empty where there is no gradient.
  std::vector<Reading> weights() const;
  const std::vector<std::string>& names() const { return own_.names; }

  // The slots of the parameters with a gradient. A gradient of another layout than its parameter's
  // is copied to `kept`, which has to outlive the slots' use. A float32 parameter whose
  // low-precision copy autocast has cached gets it as its weight: the step writes both.
  std::vector<Slot> plan(Tensors& kept);

  // After the slots of plan() have been written, or not been: counts the parameters' writes. Not
  // the states': no graph holds them, and each count is a line of memory of its own.
  void finish(bool written);

 private:
  void check_lengths() const;
  void check() const;
  Span master_of(size_t i) const;
  void remember();
  void prefetch(int64_t near, int64_t far) const;
  static uint64_t shape_of(const at::Tensor& param);  // dtype, sizes and strides, mixed
  template <class F>
  void for_each_tensor(int64_t i, const F& f) const;

  Lists own_;
  at::Device device_;
  // What check() saw, to notice what has moved since.
  std::vector<uint64_t> shapes_;     // of every parameter
  std::vector<const void*> memory_;  // of every tensor
  std::vector<Slot> slots_;          // of every parameter, without its gradient
  Tensors copies_;                   // cached casts that the step under way writes
};

}  // namespace amp_mp
