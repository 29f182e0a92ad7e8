#include "torch/step/load.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

namespace amp_mp {
namespace {

enum class Kind { param, bytes, number, numbers };

std::pair<at::ScalarType, Kind> form_of(PyObject* row) {
  if (!row || !PyTuple_Check(row) || PyTuple_GET_SIZE(row) != 2 ||
      !PyUnicode_Check(PyTuple_GET_ITEM(row, 1)))
    throw py::type_error("amp_mp: a row of a form must be (dtype, kind)");
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

// Whether a copy of its memory is all of the tensor; a sparse one says nothing about its layout.
bool is_memory(const at::Tensor& t) {
  return t.layout() == at::kStrided && t.is_contiguous() && !t._is_zerotensor() && !t.is_neg();
}

// Whether the clock can be what it says: steps are counted from 0, and powers are of betas.
bool is_count(const at::Tensor& t) {
  const double number = t.item().toDouble();
  return number >= 0 && std::isfinite(number) && number == std::floor(number);
}

bool are_powers(const at::Tensor& t) {
  const at::Tensor here = t.cpu();
  const double* powers = here.const_data_ptr<double>();
  return std::all_of(powers, powers + 2, [](double power) { return power >= 0 && power <= 1; });
}

}  // namespace

bool has_form(const py::dict& saved, const py::dict& form, const py::object& param,
              const py::str& step) {
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
    if (t.scalar_type() != dtype || t.device() != own.device() || !is_memory(t) ||
        !fits(t, own, kind))
      return false;
    if (kind == Kind::numbers && !are_powers(t)) return false;
    if (kind == Kind::number && PyUnicode_Compare(key, step.ptr()) == 0 && !is_count(t))
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
    if (!is_plain(value) || !PyUnicode_Check(key))
      throw py::type_error("amp_mp: a saved state must hold plain tensors by name");
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
