#pragma once
// The bits that rounding cut off from a weight. They are kept from its first rounding until the
// parameter is freed, while optimizers come and go: `prepare`, loads, optimizers and FP16_Optimizer
// put them here, and an optimizer's state shows the same tensor. A weight is a parameter, of a
// DTensor the part on this process. Everything here needs the GIL but stepped and stamp.
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
  // Second tensor, exceptions' indices and values, checksum, whether nobody has written the weight.
  using State = std::tuple<at::Tensor, std::optional<at::Tensor>, std::optional<at::Tensor>,
                           std::optional<int64_t>, bool>;

  // Remainders or a float32 master, as a state shows them; undefined where the weight is all.
  const at::Tensor& second() const { return second_; }
  Tensors tensors() const;   // all that is kept
  py::object entry() const;  // its name in a state
  // Whether an optimizer has shown the tensor in its state.
  bool is_taken() const { return second_.defined() && is_taken_; }
  // Whether a state that shows this tensor is out of date: others have replaced it here.
  bool has_replaced(const at::Tensor& second) const;
  bool has_replaced_any() const;

  // Keeps float32 values that the weight was rounded from, exactly, until the weight is written or
  // stepped. What a state shows is written in place.
  void keep(py::handle param, const at::Tensor& values);
  // The weight's float32 values, a new tensor; undefined where the weight itself is all, and where
  // others have written it since the last step. `goes_on`: also then the values with which the next
  // step begins of an optimizer that has taken the bits.
  at::Tensor values(py::handle param, bool goes_on = false) const;
  // The tensor itself, where it has the format and values() are these.
  at::Tensor second_as(const MasterEntry& entry, py::handle param) const;
  // What an AveragedModel reads beside the weight.
  at::Tensor rest(py::handle param, bool goes_on) const;

  // An optimizer shows this tensor from now on. `apart`: it is a float32 master in param_groups,
  // which scripts may write themselves.
  void show(const at::Tensor& second, py::handle param, bool apart = false);
  bool shows(const at::Tensor& t) const { return second_.is_same(t); }
  // A state shows this tensor, which is not the weight's any more.
  void note_replaced(const at::Tensor& second);
  // The weight was stepped, and these bits with it. stamp: it has the values of before again.
  // weight: of a DTensor its local tensor.
  void stepped(const at::Tensor& param, const at::Tensor& weight);
  void stamp(const at::Tensor& param, const at::Tensor& weight);
  // Whether nobody else has written the weight since; and a master apart.
  bool is_still(py::handle param) const;
  bool is_rounded() const { return !is_apart_ || master_.still(second_); }
  void drop();

  bool is_prepared() const { return is_prepared_; }
  void set_prepared(bool prepared) { is_prepared_ = prepared; }
  // The weight has ended, and what it had with it; whether it had any.
  void end();
  bool is_lost() const { return is_lost_; }

  // For copies of the weight.
  std::optional<State> state(py::handle param) const;
  void set_state(py::handle param, const State& state);

 private:
  // Of values that `prepare` or a load has rounded: those of elements that weight and remainder do
  // not give exactly (bfloat16: ties that round down, 4 in a million; float16: below 2^-16 and
  // above 65504), by flat index. Where this would take more than float32, and for weights that the
  // native code does not read, the second tensor is float32.
  struct Kept {
    int64_t checksum;
    at::Tensor indices, values;
    bool was_taken = false;  // whether an optimizer had taken the bits of before
  };

  bool fits(const at::Tensor& weight) const;
  // Whether an optimizer has taken these bits, or those before they were kept anew.
  bool was_taken() const { return is_taken_ || (kept_ && kept_->was_taken); }
  bool keep_in_place(const at::Tensor& values, py::handle param);
  void keep_anew(const at::Tensor& values, py::handle param, bool was_taken);
  void write_replaced(const at::Tensor& values, const at::Tensor& weight);
  at::Tensor decoded(const at::Tensor& weight, bool exactly) const;

  // What each step needs comes first, in one line of the cache.
  at::Tensor second_;
  VersionStamp param_, weight_;
  std::unique_ptr<Kept> kept_;
  at::ScalarType dtype_ = at::kFloat;  // the weight's
  bool is_taken_ = false, is_apart_ = false;
  Stamp master_;  // of a master apart, when it was rounded last
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> replaced_;
  bool is_prepared_ = false, is_lost_ = false;
};

using Bits = std::shared_ptr<LowBits>;

// The parameter's bits; null where it has never had any.
Bits low_bits_of(py::handle param);
// The same, made where it has none. owner: the parameter's module, through which a DTensor is found
// after model.to() and to_empty() have exchanged its insides; without it, until then.
Bits make_low_bits(py::handle param, py::handle owner = {});
// Where the table has who notes the parameter's changes; made where it has none.
std::weak_ptr<WeightChanges>& place_of_changes(py::handle param, py::handle owner);
// A float32 tensor for a master in param_groups: the one that is there, or a new one.
at::Tensor first_master(py::handle param);
// Lets go of a plain parameter, which then may be swapped (torch.utils.swap_tensors). Bits that no
// optimizer has taken stay.
void let_go(py::handle param);

}  // namespace amp_mp
