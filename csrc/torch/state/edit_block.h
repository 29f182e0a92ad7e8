#pragma once
// A block of `with optimizer.masters(...)`, which edits masters: reads them when it begins, and
// when it ends stores what a script has written. Everything here needs the GIL.
#include "torch/state/live_state.h"
#include "torch/weights/loans.h"

namespace amp_mp {

class EditBlock {
 public:
  using Named = std::vector<std::pair<std::string, py::object>>;  // names are for messages

  // Reads the masters of these parameters, and changes nothing. TypeError or ValueError for
  // anything but parameters of the groups that a step can update, RuntimeError for a parameter that
  // is borrowed, and in torch.inference_mode.
  EditBlock(const Layouts& rules, const py::list& groups, const py::dict& states,
            const Named& params);

  // The parameters, borrowed from here until the block ends.
  Loan& loan() { return *loan_; }

  // Float32 tensors for the parameters, in their order, placed as they are.
  const py::list& masters() const { return masters_; }

  // Stores the elements whose bits have changed. All other elements keep the bytes of weight and
  // master, and all tensors keep their addresses. The version counter of a tensor advances if
  // elements have changed, on a CUDA device if a script has written the tensor that it got: so the
  // host does not wait. RuntimeError, before anything is stored, if a parameter or its master was
  // written or replaced in the block.
  void store();

 private:
  // A tensor when the block began.
  struct Seen {
    at::Tensor tensor;
    Stamp stamp;
    Seen() = default;
    explicit Seen(const at::Tensor& t) : tensor(t), stamp(t.defined() ? Stamp(t) : Stamp()) {}
    bool is_still(const at::Tensor& now) const {
      if (!now.defined() || !tensor.defined()) return now.defined() == tensor.defined();
      return now.is_same(tensor) && stamp.still(now);
    }
  };
  struct Edit {
    Member member;
    py::object values;            // what the script writes
    const MasterEntry* master;    // null if the weight itself is what a step updates
    Seen weight, beside, before;  // before: the float32 values that were read
  };

  at::Tensor read(const Edit& edit) const;
  // Which elements have other bits now.
  at::Tensor changes(const Edit& edit) const;
  bool has_state(const Edit& edit) const;
  bool needs_state(const Edit& edit) const;  // whether storing must make the state first
  // Whether there are changes, as far as the host knows without waiting for a device.
  bool is_written(const Edit& edit, const at::Tensor& changed) const;
  void check(const Edit& edit) const;
  void store(const Edit& edit) const;

  py::dict states_;
  std::unique_ptr<Loan> loan_;
  py::list masters_;
  std::vector<Edit> edits_;
};

}  // namespace amp_mp
