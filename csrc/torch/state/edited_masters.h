#pragma once
// Masters that a script edits: `with optimizer.masters(...)` reads them when the block begins and
// stores what was written when it ends. Everything here needs the GIL.
#include "torch/state/live_state.h"

namespace amp_mp {

class EditedMasters {
 public:
  using Named = std::vector<std::pair<std::string, py::object>>;  // names are for messages

  // Reads the masters of these parameters. Changes nothing. open: the blocks that have not ended.
  // Raises TypeError or ValueError for what is no parameter of the groups or none that can be
  // stepped, RuntimeError for one of an open block, and in torch.inference_mode.
  EditedMasters(const py::list& rules, const py::list& groups, const py::dict& states,
                const Named& params, const std::vector<std::shared_ptr<EditedMasters>>& open);

  // Float32 tensors for the parameters, in their order, placed as they are.
  const py::list& masters() const { return masters_; }

  // Stores the elements whose bits have changed; all others keep the bytes of weight and master,
  // and all tensors their addresses. On a CPU a tensor without changes keeps its version counter,
  // elsewhere one whose values have kept theirs: so the host does not wait. Before anything is
  // stored it raises RuntimeError where a parameter or its master was written or replaced since.
  void store();

 private:
  // A tensor as it was when the block began.
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
    py::object values;
    bool has_master;  // beside the weight; now or, where it has no state yet, after its first step
    bool goes_on;     // whether other bits have replaced what its state showed
    Seen weight, beside, before;  // before: the values, as they were read
  };

  at::Tensor beside(const Edit& edit) const;
  at::Tensor read(const Edit& edit) const;
  // Which elements have other bits; and whether there are any, as far as the host need know.
  at::Tensor changes(const Edit& edit) const;
  bool needs_state(const Edit& edit) const;  // before what was written can be stored
  bool is_written(const Edit& edit, const at::Tensor& changed) const;
  void check(const Edit& edit) const;
  void store(Edit& edit) const;

  py::dict states_;
  py::list masters_;
  std::vector<Edit> edits_;
};

}  // namespace amp_mp
