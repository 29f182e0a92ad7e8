#pragma once
// What Muon does with directions: each matrix in them becomes nearly orthogonal.
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <optional>
#include <vector>

namespace py = pybind11;

namespace amp_mp::muon {

// A stack takes three to four times its own bytes while it is worked on, so large ones are cut.
constexpr int64_t kStackBytes = int64_t(1) << 28;

// Newton-Schulz as torch.optim.Muon's, in place: singular values become about 1. stack: bfloat16
// [n, rows, columns]. Queues products on the device and waits for nothing. On a CPU the bits do not
// depend on what else is in the stack.
void orthogonalise_(const at::Tensor& stack, const std::array<double, 3>& coefficients,
                    int64_t steps, double eps, int64_t stack_bytes = kStackBytes);

// The directions of parameters of which this process has all, and how their updates are made. It
// runs no Python between the first matrix and the last: an interrupt finds none of them made
// orthogonal, or all.
class WholeMatrices {
 public:
  using Shape = std::pair<int64_t, int64_t>;  // rows and columns

  // One each for the parameters, in the order of the directions: their memory here, param_groups,
  // and the shape of their matrices; none for a parameter that is not for this object.
  WholeMatrices(const std::vector<at::Tensor>& locals, const std::vector<py::dict>& groups,
                const std::vector<std::optional<Shape>>& shapes);

  // The same tensor, with updates in place of the directions.
  at::Tensor make_updates(const at::Tensor& directions) const;

 private:
  // Matrices of one shape with the same numbers that lie one behind the other. sizes and strides
  // are of the one parameter whose memory is not in the order of its rows, else empty.
  struct Run {
    int64_t begin, end;
    Shape matrix;
    py::dict group;
    std::vector<int64_t> sizes, strides;
  };
  std::vector<Run> runs_;
};

void bind(py::module_& m);

}  // namespace amp_mp::muon
