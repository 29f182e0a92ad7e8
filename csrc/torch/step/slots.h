#pragma once
// The tensors an optimizer updates on one device. They are checked when Slots is made, and again
// only if their memory has moved; a step reads nothing anew but the gradients.
#include <string>
#include <vector>

#include "plan.h"
#include "torch/checks.h"
#include "torch/step/shards.h"
#include "torch/step/table_memory.h"

namespace amp_mp {

class Slots {
 public:
  // Each list has one element for each parameter.
  struct Lists {
    Tensors params;
    // What the parameter and a second tensor together are the master by (core/splits.h): a float32
    // master, or int16 or int8 remainders; undefined if the rule updates the parameter itself.
    Tensors masters;
    std::vector<Tensors> states;               // one list for each state of the rule
    std::vector<Tensors> scales;               // of the states in groups, undefined elsewhere
    std::vector<std::vector<Format>> formats;  // of the states, as `states`
    std::vector<bool> stochastic;              // round a parameter without master stochastically
    Tensors clocks;                            // float64 of 4 elements (core/rules/base.h, Clock)
    std::vector<int64_t> groups;               // ascending indices into the step's hypers
    std::vector<int64_t> tensor_indices;       // for random bits: which tensor this is
    // For random bits: where a shard is in the whole tensor (core/random.h, Origin).
    std::vector<int64_t> firsts, row_lengths, row_strides;
    std::vector<std::string> names;  // for messages
    Tensors dtensors;                // whose shards the parameters are, as Shards takes them
    // That of all tensors; the first parameter's by default. Without parameters a step on a CUDA
    // device still needs it: its kernels must get no memory of the host.
    std::optional<at::Device> device;
  };
  explicit Slots(Lists lists);  // needs the GIL

  int64_t size() const { return int64_t(own_.params.size()); }
  at::Device device() const { return device_; }
  int64_t group(size_t i) const { return own_.groups[i]; }
  int64_t groups() const { return own_.groups.empty() ? 0 : own_.groups.back() + 1; }
  int states() const { return int(own_.states.size()); }
  // Where the slots' directions begin, and where the last ones end.
  std::vector<int64_t> offsets() const;

  // Whether every parameter still has the dtype, shape, layout and device that it had when Slots
  // was made, and every DTensor the same shard. plan() relies on it. Needs the GIL.
  bool fit() const;

  // Once before each step, and before its measuring: the gradients of the DTensors, as
  // Shards::find_gradients says.
  std::vector<int64_t> find_gradients() { return shards_.find_gradients(own_.names); }
  void set_gradient(int64_t i, const at::Tensor& shard) { shards_.set_gradient(i, shard); }
  void drop_gradients() { shards_.drop_gradients(); }
  // What plan() checks of them, for a caller that steps several Slots or none.
  void check_gradients() const;

  // The parameters' current gradients, undefined if a parameter has none.
  Tensors grads() const;
  // The arrays that the rule updates, for measuring; empty for parameters without a gradient.
  std::vector<Reading> weights();
  const std::vector<std::string>& names() const { return own_.names; }

  // The slots of the parameters that have a gradient. A gradient whose layout differs from its
  // parameter's is copied to `kept`, which has to live as long as the slots are used. If autocast
  // has cached a low-precision copy of a float32 parameter, the slot has the copy: the step writes
  // both. `readings`, if not null, gets one Reading per parameter for measuring the
  // gradients, empty where there is none. The result is valid until the next call.
  const std::vector<Slot>& plan(Tensors& kept, std::vector<Reading>* readings);

  // Call after each plan(). `written`: the step was not skipped, so the version counters of the
  // parameters advance, of a DTensor and of its shard. Those of the states do not: no autograd
  // graph holds a state, and each counter would cost a cache miss.
  void finish(bool written);

  TableMemory& table_memory() { return table_memory_; }
  // How often a step has found tensors in other memory.
  int64_t moves() const { return moves_; }

 private:
  static at::Device device_of(const Lists& lists);
  void check_lengths() const;
  void check() const;
  void check_gradient(int64_t i, const at::Tensor& grad) const;
  Array master_of(size_t i) const;
  // The one place that knows where gradients come from.
  const at::Tensor& gradient(size_t i) const {
    return shards_.has(i) ? shards_.gradient(i) : own_.params[i].grad();
  }
  void follow_memory();
  void remember();
  void find_copies(bool captured);
  bool writes_copy(size_t i) const;  // of a float32 parameter, beside the parameter itself
  void prefetch(int64_t near, int64_t far) const;
  static uint64_t shape_of(const at::Tensor& param);  // a hash of what fit() compares
  template <class F>
  void for_each_tensor(int64_t i, const F& f) const;

  Lists own_;
  Shards shards_;
  at::Device device_;
  // What check() has seen, to notice tensors whose memory has moved since.
  std::vector<uint64_t> shapes_;     // of every parameter
  std::vector<const void*> memory_;  // of every tensor
  std::vector<Slot> slots_;          // of every parameter, with the last step's gradient
  std::vector<Slot> chosen_;         // those of a step, where not all of slots_ as they are
  std::vector<bool> has_gradient_;   // of every parameter, in the current step
  Tensors copies_;                   // cached casts that the current step writes
  TableMemory table_memory_;
  int64_t moves_ = 0;
};

}  // namespace amp_mp
