#include "torch/step/load.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>

namespace amp_mp {
namespace {

enum class Kind { param, bytes, number, numbers };

std::pair<at::ScalarType, Kind> form_of(PyObject* row) {
  PyObject* kind = PyTuple_GET_ITEM(row, 1);
  const auto is = [&](const char* name) {
    return PyUnicode_CompareWithASCIIString(kind, name) == 0;
  };
  const auto dtype = py::cast<at::ScalarType>(py::handle(PyTuple_GET_ITEM(row, 0)));
  if (is("param")) return {dtype, Kind::param};
  if (is("bytes")) return {dtype, Kind::bytes};
  return {dtype, is("number") ? Kind::number : Kind::numbers};
}

bool fits(const at::Tensor& t, const at::Tensor& param, Kind kind) {
  if (kind == Kind::number) return t.dim() == 0;
  if (kind == Kind::numbers) return t.dim() == 1 && t.size(0) == 2;
  const int64_t dims = param.dim();
  if (t.dim() != dims + (kind == Kind::bytes)) return false;
  if (kind == Kind::bytes && t.size(dims) != 2) return false;
  return std::equal(param.sizes().begin(), param.sizes().end(), t.sizes().begin());
}

}  // namespace

bool has_form(const py::dict& saved, const py::dict& form, const py::object& param) {
  if (!is_plain(param.ptr()) || PyDict_Size(saved.ptr()) != PyDict_Size(form.ptr())) return false;
  const at::Tensor& own = THPVariable_Unpack(param.ptr());
  if (!own.is_contiguous()) return false;
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(saved.ptr(), &at, &key, &value);) {
    PyObject* row = PyDict_GetItemWithError(form.ptr(), key);
    if (!row && PyErr_Occurred()) throw py::error_already_set();
    if (!row || !is_plain(value)) return false;
    const auto [dtype, kind] = form_of(row);
    const at::Tensor& t = THPVariable_Unpack(value);
    if (t.scalar_type() != dtype || t.device() != own.device() || !t.is_contiguous() ||
        !fits(t, own, kind))
      return false;
  }
  return true;
}

py::dict copy_of_form(const py::dict& saved, const py::dict& form, const py::str& step) {
  // No autograd graph holds a state: its views need no version counter in common.
  const at::AutoDispatchBelowADInplaceOrView plain_views;
  py::dict state;
  at::Tensor numbers;
  PyObject *key, *value;
  for (Py_ssize_t at = 0; PyDict_Next(saved.ptr(), &at, &key, &value);) {
    const at::Tensor& t = THPVariable_Unpack(value);
    const Kind kind = form_of(PyDict_GetItemWithError(form.ptr(), key)).second;
    at::Tensor copy;
    if (kind == Kind::number || kind == Kind::numbers) {
      if (!numbers.defined()) numbers = at::empty({4}, t.options());
      const bool is_step = PyUnicode_Compare(key, step.ptr()) == 0;
      copy = kind == Kind::numbers ? numbers.narrow(0, 1, 2) : numbers.select(0, is_step ? 0 : 3);
      copy.copy_(t);
    } else {
      copy = t.detach().clone();
      if (kind == Kind::bytes) copy = copy.view(at::kShort).squeeze(-1);
    }
    set_item(state.ptr(), py::reinterpret_borrow<py::object>(key), wrapped(copy));
  }
  return state;
}

}  // namespace amp_mp
