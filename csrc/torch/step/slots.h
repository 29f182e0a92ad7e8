#pragma once
// The tensors an optimizer updates on one device. They are checked when Slots is made, and again
// only if their memory has moved; a step reads nothing anew but the gradients.
#include <string>
#include <vector>

#include "plan.h"
#include "torch/checks.h"
#include "torch/step/shards.h"
#include "torch/step/table_memory.h"
#include "torch/weights/weight.h"
#include "torch/weights/weight_changes.h"

namespace amp_mp {

// What a step reads and writes of one parameter.
struct SlotTensors {
  at::Tensor param;  // of a DTensor the shard on this process
  // The tensor that makes the parameter a master (core/splits.h): a float32 master, or int16 or
  // int8 remainders; undefined if the rule updates the parameter itself.
  at::Tensor master;
  std::vector<ArrayTensors> states;  // the rule's
  bool stochastic = false;           // round a parameter without master stochastically
  at::Tensor clock;                  // float64 of 4 elements (core/rules/base.h, Clock)
  int64_t group = 0;                 // index into the step's hypers
  int64_t tensor_index = 0;          // for random bits: which tensor this is
  Origin origin = {};                // for random bits: where a shard is in the whole tensor
  std::string name;                  // for messages
  py::object dtensor = {};           // the DTensor of this shard; null for a plain parameter
  WeightRecord record = {};          // has the master; null without one
  std::weak_ptr<WeightChanges> changes = {};  // which each step notes
};

class Slots {
 public:
  // Parameters by ascending groups, all on the device, which a step needs even without parameters.
  // Needs the GIL.
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

  // Call find_gradients once before each step, also before measuring for it: it looks up the
  // DTensors' gradients (Shards::find_gradients). Call drop_gradients if no step follows.
  void find_gradients() { shards_.find_gradients(); }
  void drop_gradients() { shards_.drop_gradients(); }
  // The checks that plan() makes of gradients, for a caller that steps several Slots or none.
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

  // Call after each plan(). `written`: the step was not skipped. Then the version counters of the
  // parameters advance, of a DTensor and of its shard, and their records get new stamps. Counters
  // of states do not advance: no autograd graph holds a state, and each would cost a cache miss.
  void finish(bool written);

  TableMemory& table_memory() { return table_memory_; }
  // How often a step has found tensors in other memory.
  int64_t moves() const { return moves_; }

 private:
  void check() const;
  void check_gradient(int64_t i, const at::Tensor& grad) const;
  Array master_of(size_t i) const;
  // Nothing else reads a gradient from its parameter.
  const at::Tensor& gradient(size_t i) const {
    return shards_.has(i) ? shards_.gradient(i) : own_[i].param.grad();
  }
  void follow_memory();
  void remember();
  void find_copies(bool captured);
  void find_changes(bool captured);
  bool writes_copy(size_t i) const;  // whether the step writes a cached cast beside the parameter
  void prefetch(int64_t near, int64_t far) const;
  static size_t shape_of(const at::Tensor& param);  // a hash of what fit() compares
  template <class F>
  void for_each_tensor(int64_t i, const F& f) const;

  // Of the tensors as they were checked last, by which a step notices that their memory has moved.
  struct Checked {
    std::vector<size_t> shapes;       // shape_of every parameter
    std::vector<const void*> memory;  // of every tensor
    std::vector<Slot> slots;          // one for each parameter, with the last step's gradient
  };
  // Of the current step, from plan() to finish().
  struct Planned {
    std::vector<bool> has_gradient;                     // one for each parameter
    Tensors copies;                                     // cached casts that the step writes
    std::vector<std::shared_ptr<WeightChanges>> noted;  // which it writes
    std::vector<Slot> chosen;  // its slots, if they are not checked_.slots unchanged
  };

  std::vector<SlotTensors> own_;
  Tensors params_;  // own_[i].param
  Shards shards_;
  at::Device device_;
  uint64_t watched_;  // watched_so_far() when the parameters' notes were looked up
  Checked checked_;
  Planned planned_;
  TableMemory table_memory_;
  int64_t moves_ = 0;
};

}  // namespace amp_mp
