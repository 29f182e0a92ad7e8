#pragma once
// The bits that rounding cut off from a weight. They live from its first rounding until the
// parameter is freed, while optimizers come and go: `prepare`, loads, optimizers and FP16_Optimizer
// put them here, and an optimizer's state shows the same tensor. A weight is a parameter, or a
// DTensor's part on this process. Everything here needs the GIL, but for stepped and stamp.
#include <torch/csrc/utils/pybind.h>

#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <optional>
#include <vector>

#include "torch/checks.h"
#include "torch/stamp.h"

namespace py = pybind11;

namespace amp_mp {

struct MasterEntry;
class WeightChanges;

class LowBits {
 public:
  // Second tensor, exceptions' indices and values, checksum, whether the weight is unwritten.
  using State = std::tuple<at::Tensor, std::optional<at::Tensor>, std::optional<at::Tensor>,
                           std::optional<int64_t>, bool>;

  // Remainders or a float32 master, as a state shows them; undefined if there are no bits.
  const at::Tensor& second() const { return second_; }
  Tensors tensors() const;   // all of them
  py::object entry() const;  // its name in a state
  // Whether an optimizer has shown the tensor in its state.
  bool is_taken() const { return second_.defined() && is_taken_; }
  // Whether another tensor has replaced this one here, so that a state which shows it is out of
  // date.
  bool has_replaced(const at::Tensor& second) const;
  bool has_replaced_any() const;

  // Keeps float32 values that the weight was rounded from, exactly, until the weight is written or
  // stepped. Writes the tensor that a state shows in place.
  void keep(py::handle param, const at::Tensor& values);
  // The weight's float32 values, a new tensor; undefined if there are no bits, or if others have
  // written the weight since the last step. `goes_on`: also then the values with which the next
  // step of an optimizer begins that has taken the bits.
  at::Tensor values(py::handle param, bool goes_on = false) const;
  // The second tensor itself, if it has the format and holds values().
  at::Tensor second_as(const MasterEntry& entry, py::handle param) const;
  // What an AveragedModel reads beside the weight.
  at::Tensor rest(py::handle param, bool goes_on) const;

  // An optimizer shows this tensor from now on. `apart`: it is a float32 master in param_groups,
  // which scripts may write.
  void show(const at::Tensor& second, py::handle param, bool apart = false);
  bool shows(const at::Tensor& t) const { return second_.is_same(t); }
  // A state shows this tensor, which belongs to the weight no more.
  void note_replaced(const at::Tensor& second);
  // A step has written the weight and these bits. stamp: the weight has its earlier values again.
  // weight: a DTensor's local tensor.
  void stepped(const at::Tensor& param, const at::Tensor& weight);
  void stamp(const at::Tensor& param, const at::Tensor& weight);
  // Whether only steps have written the weight, and a master in param_groups.
  bool is_still(py::handle param) const;
  bool is_rounded() const { return !is_apart_ || master_.still(second_); }
  void drop();

  bool is_prepared() const { return is_prepared_; }
  void set_prepared(bool prepared) { is_prepared_ = prepared; }
  // The weight is freed: drops the bits. is_lost: whether it had any.
  void end();
  bool is_lost() const { return is_lost_; }

  // For copies of the weight.
  std::optional<State> state(py::handle param) const;
  void set_state(py::handle param, const State& state);

 private:
  // The values, by flat index, that weight and remainder do not give exactly after `prepare` or a
  // load has rounded (bfloat16: ties that round down, 4 in a million; float16: below 2^-16 and
  // above 65504). If this would take more memory than float32, and for weights that native code
  // does not read, the second tensor is float32.
  struct Kept {
    int64_t checksum;
    at::Tensor indices, values;
    bool was_taken = false;  // whether an optimizer had taken the earlier bits
  };

  bool fits(const at::Tensor& weight) const;
  // Whether an optimizer has taken these bits, or the earlier ones that `keep` has replaced.
  bool was_taken() const { return is_taken_ || (kept_ && kept_->was_taken); }
  bool keep_in_place(const at::Tensor& values, py::handle param);
  void keep_anew(const at::Tensor& values, py::handle param, bool was_taken);
  void write_replaced(const at::Tensor& values, const at::Tensor& weight);
  at::Tensor decoded(const at::Tensor& weight, bool exactly) const;

  // First the members that each step reads, in one line of the cache.
  at::Tensor second_;
  VersionStamp param_, weight_;
  std::unique_ptr<Kept> kept_;
  at::ScalarType dtype_ = at::kFloat;  // the weight's
  bool is_taken_ = false, is_apart_ = false;
  Stamp master_;  // of a master in param_groups, when it was rounded last
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> replaced_;
  bool is_prepared_ = false, is_lost_ = false;
};

using Bits = std::shared_ptr<LowBits>;

// The parameter's bits; null if it has never had any.
Bits low_bits_of(py::handle param);
// The same, new if it has none. owner: the parameter's module, which finds a DTensor even after
// model.to() and to_empty() have exchanged its insides.
Bits make_low_bits(py::handle param, py::handle owner = {});
// The table's place for the notes of the parameter's changes.
std::weak_ptr<WeightChanges>& place_of_changes(py::handle param, py::handle owner);
// A float32 tensor for a master in param_groups: the parameter's second tensor, or a new one.
at::Tensor first_master(py::handle param);
// Drops the weak reference to a plain parameter, so that torch.utils.swap_tensors accepts it. Bits
// that no optimizer has taken stay.
void let_go(py::handle param);

}  // namespace amp_mp
