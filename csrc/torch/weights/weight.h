#pragma once
// Note: A weight owns its master (docs/design.md)
//
// Where the float32 value of a weight is, and who may write it.
//
// A weight is a parameter in float16 or bfloat16, or a DTensor's part on this process. Its float32
// value is the weight itself and the tensor beside it, its *master*: remainders, which hold the
// bits that rounding cut off, or a float32 tensor. A record, `Weight`, owns the master. It is found
// by the parameter and ends with it; optimizers, which keep moments, come and go.
//
//   who                        reads by       writes by
//   prepare, loads                            store
//   a step                     master_for     the kernels, then stepped
//   FP16_Optimizer, O2         the master     set_master; it is in their param_groups
//   masters() blocks           float32_of     master_for, then stepped
//   averages (swap)            beside         the weight alone, then stamp
//   reports, float32 files     float32_of
//   copies, pickles            state          set_state
//   optimizers' state dicts    put_entry      take_entry, by set_master
//
// Anybody may write the weight. From then on readers get what was written, and ignore the master.
// There is one exception: an optimizer that has state for the weight passes `stepping`, and still
// gets the master. Elements that nobody wrote keep their float32 values; one that was written gets
// a value that rounds to what was written. An optimizer without state for the weight, a new one or
// one after state.clear(), begins with the master of an unwritten weight, or with what was written.
//
// Writes are seen by version counters and, where no counter advances (`.data`, NumPy, shared
// memory), by a sum of the weight that a store or a step on a CPU leaves here (core/changes.h). A
// step on a GPU leaves none. A float32 master needs none: it rounds to another number then.
//
// `optimizer.state[weight]` shows the master under its name (rule_table.h, MasterEntry), because
// torch's distributed state dicts load the entries that they find there. No kernel reads it. A
// tensor that is put there instead becomes the master when the optimizer gathers its tensors, at
// the start of its next step; load_state_dict does this before it returns. When another master
// replaces the one that is shown, the shown tensor becomes empty.
//
// Everything here that takes a py::handle needs the GIL.
#include <torch/csrc/utils/pybind.h>

#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <optional>
#include <vector>

#include "torch/python/objects.h"
#include "torch/stamp.h"

namespace py = pybind11;

namespace amp_mp {

struct MasterEntry;
class WeightChanges;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// Who has borrowed a weight (loans.h).
enum class Borrower : uint8_t { nobody, masters_block, average };

class Weight {
 public:
  // For copies: the master; exceptions' indices and values; whether there are such, which was a
  // number in earlier pickles; whether the weight is unwritten, and whether an optimizer has
  // updated the master.
  using State = std::tuple<at::Tensor, std::optional<at::Tensor>, std::optional<at::Tensor>,
                           std::optional<int64_t>, bool, bool>;

  // Undefined while the weight is all of its value.
  const at::Tensor& master() const { return master_; }
  py::object entry() const;  // the master's name in an optimizer's state; None without a master
  Tensors tensors() const;   // all that is kept beside the weight

  // The weight's float32 values, a new tensor; undefined if the weight is all of them.
  at::Tensor values(const Param& param, bool stepping = false) const;
  // What an average reads beside the weight: the master, or float32 values; or undefined.
  at::Tensor beside(const Param& param, bool stepping) const;

  // Keeps float32 values that the weight has just been rounded from, exactly, until the weight is
  // written or stepped. If an optimizer's master can hold them, it is written in place. With
  // exactly = false it always is, rounded to its format.
  void store(const Param& param, const at::Tensor& values, bool exactly = true);
  // The master that a step updates, of this dtype, where the weight is: the present one, or one
  // made of it, or of the weight.
  at::Tensor master_for(const Param& param, at::ScalarType dtype, bool stepping);
  // This tensor, which goes with the weight, is the master from now on. in_groups: it is in an
  // optimizer's param_groups, and scripts may write it.
  void set_master(const Param& param, const at::Tensor& master, bool in_groups = false);
  // The master is in other memory.
  void move_master(const at::Tensor& master) { replace(master, dtype_); }
  // A step has written weight and master. stamp: the caller has put back the weight's bytes, or has
  // rounded a float32 master into it, so that the two go together.
  // local: as in Param. has_sum: the step has left the weight's sum where sum_of_step says.
  void stepped(const at::Tensor& param, const at::Tensor& local, bool has_sum = false);
  void stamp(const at::Tensor& param, const at::Tensor& local);
  // Where a step leaves the sum of the weights that it stores; null if it need not.
  uint64_t* sum_of_step() { return needs_sum() ? &sum_ : nullptr; }
  // The parameter has got other insides, with a version counter of their own.
  void exchange() { is_exchanged_ = true; }
  void drop();  // frees the master: the weight is all of its value

  // Whether nobody has written the weight since it was stored or stepped.
  bool is_unwritten(const Param& param) const;
  // Whether a script has written the master in param_groups since the last step. Then it counts,
  // whatever the weight is.
  bool is_master_written() const { return is_in_groups_ && !written_.still(master_); }
  // Whether an optimizer has updated the master.
  bool is_stepped() const { return is_stepped_; }
  // Whether an optimizer's state shows the master, or param_groups have it.
  bool is_held() const {
    return present_shown().defined() || (is_in_groups_ && master_.use_count() > 1);
  }

  // Another tensor over the master's memory, for optimizers' states to show. When another master
  // replaces this one, it becomes empty: nobody takes it, or a copy of it, for the present one.
  at::Tensor shown();
  bool shows(const at::Tensor& t) const;
  // A tensor that a state has, and nobody else, is shown, and its memory is the master's.
  void set_shown_master(const Param& param, const at::Tensor& shown);

  Borrower borrower() const { return borrower_; }
  void set_borrower(Borrower by) { borrower_ = by; }
  bool is_prepared() const { return is_prepared_; }
  void set_prepared(bool prepared) { is_prepared_ = prepared; }
  // Whether load_state_dict(assign=True) has put another parameter in this one's place.
  bool is_replaced() const { return is_replaced_; }
  void set_replaced(bool replaced) { is_replaced_ = replaced; }
  // The parameter is freed. is_lost: whether it had a master then, which sharding after `prepare`
  // would lose in silence.
  void end();
  bool is_lost() const { return is_lost_; }
  // Whether there is anything that a new record would not say.
  bool is_used() const {
    return master_.defined() || borrower_ != Borrower::nobody || is_prepared_ || is_replaced_;
  }

  std::optional<State> state(const Param& param) const;
  void set_state(const Param& param, const State& state);

 private:
  // The values that weight and master cannot hold after `store`, by flat index (bfloat16:
  // ties that round down, 4 in a million; float16: below 2^-16 and above 65504). If this would take
  // more memory than float32, and for weights that native code does not read, the master is the
  // float32 values themselves, and there are no indices.
  struct Stored {
    at::Tensor indices, values;
  };

  bool fits(const at::Tensor& weight) const;
  // Whether the master cannot tell of itself that the weight was written.
  bool needs_sum() const { return master_.defined() && master_.scalar_type() != at::kFloat; }
  bool store_in_place(const Param& param, const at::Tensor& values, bool exactly);
  void store_anew(const Param& param, const at::Tensor& values);
  void set_stored(const at::Tensor& weight, at::Tensor indices, at::Tensor values);
  void take_sum(const at::Tensor& weight);
  ArrayTensors held(const Param& param, bool stepping, bool exactly = true) const;
  bool is_present(const ArrayTensors& found) const;  // whether the master itself is in it
  at::Tensor present_shown() const;
  void replace(const at::Tensor& master, at::ScalarType dtype);

  // First the members that each step reads, in one line of the cache.
  at::Tensor master_;
  VersionStamp param_, local_;
  std::unique_ptr<Stored> stored_;
  at::ScalarType dtype_ = at::kFloat;  // the weight's
  bool is_stepped_ = false, is_in_groups_ = false;
  bool has_sum_ = false, is_exchanged_ = false;
  uint64_t sum_ = 0;  // of the weight, at the last store or step
  Stamp written_;     // of a master in param_groups, when it was rounded last
  std::optional<WeakTensor> shown_;
  bool is_prepared_ = false, is_lost_ = false, is_replaced_ = false;
  Borrower borrower_ = Borrower::nobody;
};

using WeightRecord = std::shared_ptr<Weight>;

// The parameter's record; null if it has none.
WeightRecord weight_of(py::handle param);
// The same, new if it has none. owner: the parameter's module, which finds a DTensor even after
// model.to() and to_empty() have exchanged its insides.
WeightRecord weight_at(py::handle param, py::handle owner = {});
// Its master; undefined if there is none.
at::Tensor master_of(py::handle param);
// The table's place for the notes of the parameter's changes.
std::weak_ptr<WeightChanges>& place_of_changes(py::handle param, py::handle owner);

// The float32 values of a parameter of any dtype, a new tensor: of a DTensor's part here.
at::Tensor float32_of(py::handle param, bool stepping = false);

// One parameter's state in an optimizer. take_entry: what a script, a load or a copy has put there
// under a master's name becomes the master; ValueError if it does not go with the weight.
// put_entry: shows the master of the parameter's record there, if it has one, and nothing else
// under such a name.
void take_entry(py::handle param, py::handle state);
void put_entry(const WeightRecord& record, py::handle param, py::handle state);

// Ends the records of these parameters that nobody uses, and the weak references with them.
void drop_unused_weights(const std::vector<py::object>& params);
// Ends the weak references to these parameters, so that torch.utils.swap_tensors accepts them.
// Their records end when nobody else has the parameters, at the next call or the next new record.
void release_weights(const std::vector<py::object>& params);

}  // namespace amp_mp
