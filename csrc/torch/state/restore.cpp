#include "torch/state/restore.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>

namespace amp_mp {
namespace {

// What an entry of a state dict is: of the parameter's shape; the same with one more dimension of
// 2, the bytes of 16-bit integers; or the step count, another number or two numbers of the clock.
enum class Kind { param, bytes, step, number, numbers };

struct Row {
  py::object entry;
  at::ScalarType dtype;
  Kind kind;
};

Row row_of(const py::object& entry, at::ScalarType dtype) {
  return dtype == at::kShort ? Row{entry, at::kByte, Kind::bytes} : Row{entry, dtype, Kind::param};
}

// What a state dict has of a parameter as its group stores it; empty where that has groups of
// elements or numbers of rows, or the parameter's dtype is none of the optimizers'.
std::vector<Row> form_of(const RuleLayout& layout, PyObject* group, const at::Tensor& param) {
  static PyObject* const master = PyUnicode_InternFromString("master");
  const auto format_at = [&](PyObject* name) {
    return py::cast<std::string>(py::handle(number_of(group, name)));
  };
  const at::ScalarType weight = param.scalar_type();
  if (weight != at::kFloat && !is_low_precision(param)) return {};
  std::vector<Row> form{{layout.step, at::kDouble, Kind::step},
                        {layout.powers, at::kDouble, Kind::numbers},
                        {layout.own, at::kDouble, Kind::number}};
  for (const KeptState& kept : layout.states) {
    if (kept.of_rows) return {};
    const Format format = format_named(format_at(kept.name.ptr()));
    for (const StoredFormat& stored : kept.formats) {
      if (stored.format != format) continue;
      if (!stored.scales.is_none()) return {};
      form.push_back(row_of(stored.entry, stored.dtype));
    }
  }
  const std::string wanted = format_at(master);
  for (const MasterEntry& each : layout.masters)
    if (is_low_precision(param) && each.format == wanted && each.weight.value_or(weight) == weight)
      form.push_back(row_of(each.entry, each.dtype));
  return form;
}

const Row* find_row(const std::vector<Row>& form, PyObject* name) {
  for (const Row& row : form)
    if (row.entry.equal(py::handle(name))) return &row;
  return nullptr;
}

bool fits(const at::Tensor& t, const at::Tensor& param, Kind kind) {
  if (kind == Kind::number || kind == Kind::step) return t.dim() == 0;
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
  const double number = doubles_on_host(t).item<double>();
  return number >= 0 && std::isfinite(number) && number == std::floor(number);
}

bool are_powers(const at::Tensor& t) {
  const at::Tensor here = doubles_on_host(t);
  const double* powers = here.const_data_ptr<double>();
  return std::all_of(powers, powers + 2, [](double power) { return power >= 0 && power <= 1; });
}

bool has_form(const py::dict& saved, const std::vector<Row>& form, const at::Tensor& param) {
  if (form.empty() || py::len(saved) != form.size() || !param.is_contiguous()) return false;
  for (const auto& [name, value] : saved) {
    const Row* row = find_row(form, name.ptr());
    if (!row || !is_plain(value.ptr())) return false;
    const at::Tensor& t = THPVariable_Unpack(value.ptr());
    if (t.scalar_type() != row->dtype || t.device() != param.device() || !is_memory(t) ||
        !fits(t, param, row->kind))
      return false;
    if (row->kind == Kind::numbers && !are_powers(t)) return false;
    if (row->kind == Kind::step && !is_count(t)) return false;
  }
  return true;
}

py::dict copy_of_form(const py::dict& saved, const std::vector<Row>& form) {
  // No autograd graph holds a state: its views need no version counter in common.
  const at::AutoDispatchBelowADInplaceOrView plain_views;
  py::dict state;
  at::Tensor numbers;
  for (const auto& [name, value] : saved) {
    const at::Tensor& t = THPVariable_Unpack(value.ptr());
    const Kind kind = find_row(form, name.ptr())->kind;
    at::Tensor copy;
    if (kind == Kind::param || kind == Kind::bytes) {
      copy = t.detach().clone();
      if (kind == Kind::bytes) copy = copy.view(at::kShort).squeeze(-1);
    } else {
      if (!numbers.defined()) numbers = at::empty({4}, t.options());
      copy = kind == Kind::numbers ? numbers.narrow(0, 1, 2)
                                   : numbers.select(0, kind == Kind::step ? 0 : 3);
      copy.copy_(t);
    }
    set_item(state.ptr(), py::reinterpret_borrow<py::object>(name), wrapped(copy));
  }
  return state;
}

}  // namespace

py::dict copies_as_stored(const py::list& rules, const py::list& groups,
                          const py::dict& state_dict) {
  const std::vector<GroupRule> own = rules_of(rules);
  check_rules(own, groups);
  const py::object states = state_dict["state"], files = state_dict["param_groups"];
  py::dict found;
  int64_t index = 0;
  for (size_t number = 0; number < groups.size(); ++number) {
    PyObject* group = groups[number].ptr();
    const py::list params = params_of(group), saved_as = files[py::int_(number)]["params"];
    for (size_t i = 0; i < params.size(); ++i, ++index) {
      const py::object param = params[i], saved = states.attr("get")(saved_as[i]);
      if (!PyDict_CheckExact(saved.ptr()) || !is_plain(param.ptr())) continue;
      const at::Tensor& t = THPVariable_Unpack(param.ptr());
      const std::vector<Row> form = form_of(*own[number].layout, group, t);
      const auto state = py::reinterpret_borrow<py::dict>(saved);
      if (has_form(state, form, t)) found[py::int_(index)] = copy_of_form(state, form);
    }
  }
  return found;
}

}  // namespace amp_mp
