#pragma once
// How Newton-Schulz makes a matrix orthogonal: the polynomials, as a param_group names them.
#include <c10/core/ScalarType.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <vector>

namespace py = pybind11;

namespace amp_mp::muon {

// One iteration turns each singular value x into a x + b x^3 + c x^5.
using Polynomial = std::array<double, 3>;

struct NewtonSchulz {
  std::vector<Polynomial> iterations;
  double eps;            // the least norm that a matrix is divided by; 0: none, at any size
  at::ScalarType dtype;  // of the products
  double gram_from;      // matrices so many times as long as wide iterate on their Gram matrix
};

// ns_coefficients, ns_steps, ns_dtype, ns_gram and eps of a param_group; ValueError naming one.
NewtonSchulz newton_schulz_of(const py::dict& group);

}  // namespace amp_mp::muon
