#pragma once
// Parameters that a `with` block has borrowed until it ends: a block of masters(), which stores
// what it has read and a script has edited, or AveragedModel.swap, which has put averages into
// them. A parameter has one borrower at a time. Everything here needs the GIL.
#include <string>
#include <vector>

#include "torch/weights/weight.h"

namespace amp_mp {

class Loan {
 public:
  Loan(const std::vector<py::object>& params, Borrower by) : params_(params), by_(by) {}
  Loan(const Loan&) = delete;
  ~Loan() { give_back(); }

  // Raises as refuse_borrowed if one of the parameters is borrowed already. Then it borrows none.
  void borrow(const std::string& what);
  // Does nothing before borrow, and a second time.
  void give_back();
  static bool is_any();  // whether any parameter is borrowed now

 private:
  std::vector<py::object> params_;
  std::vector<WeightRecord> records_;  // of the parameters, once borrowed
  Borrower by_;
};

// Raises RuntimeError, which begins with `what`, if one of the parameters is borrowed. reads: it
// only reads them, which a block of masters() allows.
void refuse_borrowed(const py::iterable& params, const std::string& what, bool reads = false);

}  // namespace amp_mp
