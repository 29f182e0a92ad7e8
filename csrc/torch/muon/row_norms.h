#pragma once
// NorMuon (Li et al., "NorMuon: making Muon more efficient and scalable", 2025): each row of an
// orthogonal update is divided by the root of its running mean square.
#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace py = pybind11;

namespace amp_mp::muon {

// The sizes of a parameter's second moment: its own, with 1 in place of the columns of its
// matrices.
std::vector<int64_t> row_sizes(at::IntArrayRef sizes, bool flattened);

class RowNorms {
 public:
  // A parameter whose updates lie at `begin`: its memory here, its second moment, float32 of
  // row_sizes, its param_group, and how many rows a matrix, or each of its equal blocks, has.
  struct Member {
    int64_t begin;
    at::Tensor local;
    py::object param, moment;
    py::dict group;
    int64_t rows;
  };
  void add(Member member) { members_.push_back(std::move(member)); }
  bool is_empty() const { return members_.empty(); }

  // Normalises the updates in place and advances the second moments, which an overflow in the
  // verdict leaves as they were, and a missing gradient:
  //
  //     v = beta2 v + (1 - beta2) mean of the row's squares
  //     row = row / (sqrt(v) + 1e-10), times what keeps the norm of the matrix
  //
  // The paper's rate, .2 lr sqrt(rows columns) / |O|, is that of adjust_lr_fn="match_rms_adamw" for
  // an orthogonal matrix. All processes that have a part of a matrix call it; each adds the rows of
  // all in their order, so that they agree in every bit.
  void normalise(const at::Tensor& updates, const at::Tensor& verdict,
                 const std::vector<bool>& has_gradient) const;

 private:
  std::vector<Member> members_;
};

}  // namespace amp_mp::muon
