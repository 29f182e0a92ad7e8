#include "torch/weights/loans.h"

#include "torch/bind.h"
#include "torch/state/members.h"

namespace amp_mp {
namespace {

int64_t borrowed_now = 0;  // parameters

}  // namespace

bool Loan::is_any() { return borrowed_now > 0; }

void Loan::borrow(const std::string& what) {
  refuse_borrowed(py::cast(params_), what);
  std::vector<WeightRecord> records;
  for (const py::object& param : params_) records.push_back(weight_at(param));
  for (const WeightRecord& record : records) record->set_borrower(by_);
  records_ = std::move(records);
  borrowed_now += int64_t(records_.size());
}

void Loan::give_back() {
  for (const WeightRecord& record : records_) record->set_borrower(Borrower::nobody);
  borrowed_now -= int64_t(records_.size());
  records_.clear();
  drop_unused_weights(params_);
}

void refuse_borrowed(const py::iterable& params, const std::string& what, bool reads) {
  if (!Loan::is_any()) return;
  for (const py::handle param : params) {
    const WeightRecord record = is_tensor(param) ? weight_of(param) : nullptr;
    const Borrower by = record ? record->borrower() : Borrower::nobody;
    TORCH_CHECK(by != Borrower::average, what,
                " inside of AveragedModel.swap(), where the model's weights are averages; do it "
                "after the block");
    TORCH_CHECK(reads || by != Borrower::masters_block, what,
                " inside of a block of masters(), whose end would overwrite the result; do it "
                "after the block");
  }
}

void bind_loans(py::module_& m) {
  py::class_<Loan>(m, "Loan")
      .def(py::init([](const std::vector<py::object>& params) {
             return std::make_unique<Loan>(params, Borrower::average);
           }),
           py::arg("params"))
      .def("borrow", &Loan::borrow, py::arg("what"))
      .def("give_back", &Loan::give_back)
      .def_property_readonly_static("is_any", [](const py::object&) { return Loan::is_any(); });
  m.def("refuse_borrowed", &refuse_borrowed, py::arg("params"), py::arg("what"),
        py::arg("reads") = false);
}

}  // namespace amp_mp
