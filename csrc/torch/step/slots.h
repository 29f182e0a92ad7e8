#pragma once
// The tensors an optimizer updates on one device. They are checked when Slots is made, and again
// only if their memory has moved; a step reads nothing anew but the gradients.
#include <string>
#include <vector>

#include "plan.h"
#include "torch/checks.h"
#include "torch/state/low_bits.h"
#include "torch/state/weight_changes.h"
#include "torch/step/shards.h"
#include "torch/step/table_memory.h"

namespace amp_mp {

// What a step reads and writes of one parameter.
struct SlotTensors {
  at::Tensor param;  // of a DTensor the shard on this process
  // What the parameter and a second tensor together are the master by (core/splits.h): a float32
  // master, or int16 or int8 remainders; undefined if the rule updates the parameter itself.
  at::Tensor master;
  std::vector<ArrayTensors> states;  // those of the rule; rest: scales of a state in groups
  bool stochastic = false;           // round a parameter without master stochastically
  at::Tensor clock;                  // float64 of 4 elements (core/rules/base.h, Clock)
  int64_t group = 0;                 // index into the step's hypers
  int64_t tensor_index = 0;          // for random bits: which tensor this is
  Origin origin = {};                // for random bits: where a shard is in the whole tensor
  std::string name;                  // for messages
  py::object dtensor = {};           // whose shard the parameter is; null for a plain parameter
  Bits bits = {};                    // whose second tensor the master is; null without a master
  std::weak_ptr<WeightChanges> changes = {};  // that each step notes
};

class Slots {
 public:
  // By ascending groups, all on the device: without parameters a step on a CUDA device still needs
  // it. Needs the GIL.
  Slots(std::vector<SlotTensors> own, const at::Device& device);

  int64_t size() const { return int64_t(own_.size()); }
  at::Device device() const { return device_; }
  int64_t group(size_t i) const { return own_[i].group; }
  int64_t groups() const { return own_.empty() ? 0 : own_.back().group + 1; }
  // Where the slots' directions begin, and where the last ones end.
  std::vector<int64_t> offsets() const;

  // Whether every parameter still has the dtype, shape, layout and device that it had when Slots
  // was made, and its master; and every DTensor the same shard. plan() relies on it. Needs the GIL.
  bool fit() const;

  // Once before each step, and before its measuring: looks up the gradients of the DTensors, as
  // Shards::find_gradients says. drop_gradients: where no step follows.
  void find_gradients() { shards_.find_gradients(); }
  void drop_gradients() { shards_.drop_gradients(); }
  // What plan() checks of them, for a caller that steps several Slots or none.
  void check_gradients() const;

  // The parameters' current gradients, undefined if a parameter has none.
  Tensors grads() const;
  // The arrays that the rule updates, for measuring; empty for parameters without a gradient.
  std::vector<Reading> weights();
  const std::string& name(size_t i) const { return own_[i].name; }

  // The slots of the parameters that have a gradient. A gradient whose layout differs from its
  // parameter's is copied to `kept`, which has to live as long as the slots are used. If autocast
  // has cached a low-precision copy of a float32 parameter, the slot has the copy: the step writes
  // both. `readings`, if not null, gets one Reading per parameter for measuring the
  // gradients, empty where there is none. The result is valid until the next call.
  const std::vector<Slot>& plan(Tensors& kept, std::vector<Reading>* readings);

  // Call after each plan(). `written`: the step was not skipped, so the version counters of the
  // parameters advance, of a DTensor and of its shard, and their low bits are theirs. Those of the
  // states do not: no autograd graph holds a state, and each counter would cost a cache miss.
  void finish(bool written);

  TableMemory& table_memory() { return table_memory_; }
  // How often a step has found tensors in other memory.
  int64_t moves() const { return moves_; }

 private:
  void check() const;
  void check_gradient(int64_t i, const at::Tensor& grad) const;
  Array master_of(size_t i) const;
  // The one place that knows where gradients come from.
  const at::Tensor& gradient(size_t i) const {
    return shards_.has(i) ? shards_.gradient(i) : own_[i].param.grad();
  }
  void follow_memory();
  void remember();
  void find_copies(bool captured);
  void find_changes(bool captured);
  bool writes_copy(size_t i) const;  // of a float32 parameter, beside the parameter itself
  void prefetch(int64_t near, int64_t far) const;
  static uint64_t shape_of(const at::Tensor& param);  // a hash of what fit() compares
  template <class F>
  void for_each_tensor(int64_t i, const F& f) const;

  std::vector<SlotTensors> own_;
  Tensors params_;                               // of own_
  std::vector<Bits> bits_;                       // null without a master
  std::vector<const c10::TensorImpl*> masters_;  // what each of bits_ has shown
  Shards shards_;
  at::Device device_;
  // What check() has seen, to notice tensors whose memory has moved since.
  std::vector<uint64_t> shapes_;     // of every parameter
  std::vector<const void*> memory_;  // of every tensor
  std::vector<Slot> slots_;          // of every parameter, with the last step's gradient
  std::vector<Slot> chosen_;         // those of a step, where not all of slots_ as they are
  std::vector<bool> has_gradient_;   // of every parameter, in the current step
  Tensors copies_;                   // cached casts that the current step writes
  uint64_t watched_;                 // watched_so_far() when the parameters' notes were looked up
  std::vector<std::shared_ptr<WeightChanges>> noted_;  // those that the current step writes
  TableMemory table_memory_;
  int64_t moves_ = 0;
};

}  // namespace amp_mp
