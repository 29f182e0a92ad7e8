// Float32 masters of low-precision parameters.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "torch/device.h"
#include "torch/ops.h"
#include "torch/state/live_state.h"

namespace amp_mp {
namespace {

// Remainders of values that the weight has been rounded from, which stays as it is. A split rounds
// half way between two weights away from zero, and split24 after rounding to 24 bits, prepare to
// nearest even: where the two differ, the largest remainder is the nearest.
void store_beside(const at::Tensor& values, const at::Tensor& weight, const at::Tensor& rest,
                  Format format) {
  const at::Tensor own = at::empty_like(weight);
  store_values(values, own, rest, format);
  const at::Tensor above = own.view(at::kShort).sub(weight.view(at::kShort));
  const double largest = rest.scalar_type() == at::kChar ? 127 : 32767;
  rest.masked_fill_(above.ne(0), 0).masked_fill_(above.eq(1), largest);
}

}  // namespace

bool is_low_precision(const at::Tensor& t) {
  return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
}

at::Tensor Masters::beside(const at::Tensor& weight, PyObject* state) const {
  for (const MasterEntry& each : entries_) {
    if (each.weight ? *each.weight != weight.scalar_type() : false) continue;
    if (PyObject* found = item_of(state, each.entry.ptr())) return local_of(found);
  }
  return {};
}

at::Tensor Masters::values(const at::Tensor& weight, PyObject* state) const {
  at::Tensor second = beside(weight, state);
  if (!second.defined()) return {};
  const at::NoGradGuard no_grad;
  second = placed(second, weight);
  const std::optional<Format> format = format_of_master(weight, second);
  TORCH_CHECK_VALUE(format, "amp_mp: the master (", describe(second),
                    ") does not go with the weight (", describe(weight), ")");
  const bool whole = second.scalar_type() == at::kFloat;
  const at::Tensor own = weight.detach();
  return whole ? values_of(second, own, *format) : values_of(own, second, *format);
}

void Masters::set(const std::string& format, PyObject* param, PyObject* state,
                  at::Tensor values) const {
  const at::NoGradGuard no_grad;
  const at::Tensor weight = local_of(param).detach();
  if (format != "none") {
    TORCH_CHECK_TYPE(is_low_precision(weight), "amp_mp: the weight (", describe(weight),
                     ") must be float16 or bfloat16 to have a master");
    entry_of(format, weight.scalar_type());  // raises before anything is changed
  }
  const bool is_given = values.defined();
  if (!is_given) {
    if (format == "none") return drop(state);
    if (item_of(state, entry_of(format, weight.scalar_type()))) return;
    values = this->values(weight, state);
    if (!values.defined()) {
      const py::object kept = python_functions().first_values.attr("take")(py::handle(param));
      if (!kept.is_none()) values = local_of(kept.ptr());
    }
  }
  drop(state);
  const auto set = [&](PyObject* entry, const at::Tensor& made) {
    set_item(state, py::reinterpret_borrow<py::object>(entry), like(made, param));
  };
  if (format == "none") return;
  PyObject* entry = entry_of(format, weight.scalar_type());
  at::Tensor second;
  if (format == "float32") {
    second = at::empty_like(weight, weight.options().dtype(at::kFloat));
  } else {
    const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const MasterEntry& each) {
      return each.entry.ptr() == entry;
    });
    second = at::zeros_like(weight, weight.options().dtype(found->dtype));
  }
  set(entry, second);
  const Format native = *format_of_master(weight, second);
  if (!values.defined()) {  // the weight itself is the master: remainders of it are 0
    if (format == "float32") second.copy_(weight);
  } else if (format == "float32") {
    store_values(values, second, weight, native);
  } else if (is_given) {
    store_values(values, weight, second, native);
  } else {
    store_beside(values, weight, second, native);
  }
  if (is_given && is_dtensor(param))
    bump_version(THPVariable_Unpack(param));  // its shard has advanced alone
}

void Masters::follow(PyObject* param, const at::Tensor& weight, PyObject* state) const {
  const bool low = is_low_precision(weight);
  for (const MasterEntry& each : entries_) {
    PyObject* found = item_of(state, each.entry.ptr());
    if (!low || (each.weight && *each.weight != weight.scalar_type())) {
      drop_item(state, each.entry);
    } else if (is_tensor(found)) {
      const at::Tensor present = local_of(found), moved = placed(present, weight);
      if (moved.is_same(present)) continue;
      used_on_current_stream(present);  // it may be of another, and is dropped
      set_item(state, each.entry, like(moved, param));
    }
  }
}

PyObject* Masters::entry_of(const std::string& format, at::ScalarType weight) const {
  for (const MasterEntry& each : entries_)
    if (each.format == format && (!each.weight || *each.weight == weight)) return each.entry.ptr();
  throw py::value_error("amp_mp: \"" + format + "\" is not a format of masters");
}

void Masters::drop(PyObject* state) const {
  for (const MasterEntry& each : entries_) {
    // Its memory may be of another stream, whose allocator would give it away while this one reads.
    if (PyObject* found = item_of(state, each.entry.ptr()); is_tensor(found))
      used_on_current_stream(local_of(found));
    drop_item(state, each.entry);
  }
}

}  // namespace amp_mp
