#pragma once
// Masters that a script edits: `with optimizer.masters(...)` reads them when the block begins and
// stores what was written when it ends. Everything here needs the GIL.
#include "torch/state/live_state.h"

namespace amp_mp {

class EditedMasters {
 public:
  // Reads the masters of these parameters: a parameter, a nest of lists, tuples, dicts and other
  // iterables of them, or None for a list of all. Changes nothing. open: the blocks that have not
  // ended. Raises TypeError or ValueError for what is no parameter of the groups or none that can
  // be stepped, RuntimeError for one of an open block, and in torch.inference_mode.
  EditedMasters(const py::list& rules, const py::list& groups, const py::dict& states,
                const py::object& params, const std::vector<std::shared_ptr<EditedMasters>>& open);

  // The parameters, and in their places float32 tensors, placed as they are.
  const py::list& params() const { return params_; }
  const py::object& masters() const { return masters_; }

  // Stores the elements whose bits have changed; all others keep the bytes of weight and master,
  // and all tensors their addresses. On a CPU a tensor without changes keeps its version counter,
  // elsewhere one whose values have kept theirs: so the host does not wait. Before anything is
  // stored it raises RuntimeError where `masters` holds other tensors than at the beginning, or
  // where a parameter or its master was written or replaced since.
  void store();

 private:
  // A tensor, and how one sees later that it was written.
  struct Seen {
    at::Tensor tensor;
    const void* memory = nullptr;
    int64_t version = 0;
    Seen() = default;
    explicit Seen(const at::Tensor& t);
    bool is_still(const at::Tensor& now) const;
  };
  struct Edit {
    Member member;
    Layout layout;
    py::object group, values;
    bool has_master;  // beside the weight; now or, where it has no state yet, after its first step
    Seen weight, beside, before;  // before: the values, as they were read
  };

  at::Tensor beside(const Edit& edit) const;
  at::Tensor read(const Edit& edit) const;
  // Which elements have other bits; and whether there are any, as far as the host need know.
  at::Tensor changes(const Edit& edit) const;
  bool is_written(const Edit& edit, const at::Tensor& changed) const;
  void check(const Edit& edit) const;
  void store(Edit& edit) const;

  py::dict states_;
  py::list params_, values_;  // values_: one for each of params_
  py::object masters_;
  std::vector<Edit> edits_;
};

void bind_edited_masters(py::module_& m);

}  // namespace amp_mp
