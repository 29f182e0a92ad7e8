#pragma once
// What Muon does with directions: each matrix in them becomes nearly orthogonal.
#include <optional>
#include <tuple>

#include "torch/muon/newton_schulz.h"

namespace amp_mp::muon {

// A stack takes three to four times its own bytes while it is worked on, so large ones are cut.
constexpr int64_t kStackBytes = int64_t(1) << 28;

// Where the directions of these parameters begin in the memory of all, and where that ends. Each
// begins at a multiple of 16 bytes, as the widest loads and the fastest products need it.
std::vector<int64_t> direction_offsets(const std::vector<at::Tensor>& params);

// Newton-Schulz, in place: singular values become about `factor`. stack: bfloat16
// [n, rows, columns]. Queues products on the device and waits for nothing. On a CPU the bits do not
// depend on what else is in the stack.
void orthogonalise_(const at::Tensor& stack, const NewtonSchulz& how, double factor = 1,
                    int64_t stack_bytes = kStackBytes);

// The directions of parameters of which this process has all, and how their updates are made. It
// runs no Python between the first matrix and the last: an interrupt finds none of them made
// orthogonal, or all.
class WholeMatrices {
 public:
  // What a matrix consists of from its first row to its last: so many matrices of so many rows and
  // columns, whose singular values become about so much.
  using Blocks = std::vector<std::tuple<int64_t, int64_t, int64_t, double>>;

  // One each for the parameters, in the order of the directions: their memory here, param_groups,
  // and blocks; none for a parameter that is not for this object.
  WholeMatrices(const std::vector<at::Tensor>& locals, const std::vector<py::dict>& groups,
                const std::vector<std::optional<Blocks>>& blocks);

  const std::vector<int64_t>& offsets() const { return offsets_; }
  // The same tensor, with updates in place of the directions.
  at::Tensor make_updates(const at::Tensor& directions) const;

 private:
  // Parameters of the same blocks and numbers that lie one behind the other: sizes and strides of
  // all of them, or of the one whose memory is not in the order of its rows.
  struct Run {
    int64_t begin, end;
    Blocks blocks;
    py::dict group;
    std::vector<int64_t> sizes, strides;
    bool is_alone;
  };
  std::vector<int64_t> offsets_;
  std::vector<Run> runs_;
};

}  // namespace amp_mp::muon
