// Float32 masters of low-precision parameters, as live_state.h has them.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

#include "torch/device.h"
#include "torch/ops.h"
#include "torch/state/live_state.h"

namespace amp_mp {

// Stores the remainders of values that the weight was rounded from; the weight does not change.
// Half way between two weights a split rounds away from zero (split24 after rounding to 24 bits),
// `prepare` to nearest even: if the two differ, the largest remainder is the nearest to the value.
void store_beside(const at::Tensor& values, const ArrayTensors& master) {
  const auto& [weight, format, rest] = master;
  const at::Tensor own = at::empty_like(weight);
  store_values(values, {own, format, rest});
  const at::Tensor above = own.view(at::kShort).sub(weight.view(at::kShort));
  const double largest = rest.scalar_type() == at::kChar ? 127 : 32767;
  rest.masked_fill_(above.ne(0), 0).masked_fill_(above.eq(1), largest);
}

namespace {

void drop_master(py::handle state) {
  for (const MasterEntry& each : master_entries()) {
    // Its memory may be another stream's, whose allocator would reuse it while this stream reads.
    if (const py::handle found = item_of(state, each.entry); is_tensor(found))
      used_on_current_stream(local_of(found));
    drop_item(state, each.entry);
  }
}

}  // namespace

bool is_low_precision(const at::Tensor& t) {
  return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
}

at::Tensor master_beside(const at::Tensor& weight, py::handle state) {
  for (const MasterEntry& each : master_entries()) {
    if (each.weight && *each.weight != weight.scalar_type()) continue;
    if (const py::handle found = item_of(state, each.entry)) return local_of(found);
  }
  return {};
}

at::Tensor master_values(const at::Tensor& weight, py::handle state) {
  at::Tensor second = master_beside(weight, state);
  if (!second.defined()) return {};
  const at::NoGradGuard no_grad;
  second = placed(second, weight);
  const std::optional<ArrayTensors> master = master_in(weight.detach(), second);
  TORCH_CHECK_VALUE(master, "amp_mp: the master (", describe(second),
                    ") does not go with the weight (", describe(weight), ")");
  return values_of(*master);
}

void set_master(const std::string& format, py::handle param, py::handle state, at::Tensor values,
                bool goes_on) {
  const at::NoGradGuard no_grad;
  const at::Tensor weight = local_of(param).detach();
  const MasterEntry* const entry = master_entry(format, weight.scalar_type());
  if (format != "none") {
    TORCH_CHECK_TYPE(is_low_precision(weight), "amp_mp: the weight (", describe(weight),
                     ") must be float16 or bfloat16 to have a master");
    TORCH_CHECK_VALUE(entry, "amp_mp: \"", format, "\" is not a format of masters");
  }
  const bool is_given = values.defined(), bumps = is_given && is_dtensor(param);
  if (!is_given && entry && item_of(state, entry->entry)) return;
  const Bits bits = low_bits_of(param);
  if (format == "none") {
    drop_master(state);
    if (bits) bits->drop();
    return;
  }
  if (!is_given) {
    values = master_values(weight, state);
    if (!values.defined() && !bits && is_dtensor(param)) package().refuse_lost(param);
    if (!values.defined() && bits && goes_on && !bits->is_still(param))
      values = bits->values(param, goes_on);
    if (!values.defined()) {
      const at::Tensor first = format == "float32" ? first_master(param)
                               : bits              ? bits->second_as(*entry, param)
                                                   : at::Tensor();
      if (first.defined()) return set_item(state, entry->entry, like(first, param));
      if (bits) values = bits->values(param);
    }
  }
  const auto options = weight.options().dtype(entry->dtype);
  const at::Tensor second =
      format == "float32" ? at::empty_like(weight, options) : at::zeros_like(weight, options);
  // For a DTensor this runs Python, where an interrupt may come: before anything changes.
  const py::object made = like(second, param);
  const ArrayTensors master = *master_in(weight, second);
  if (is_given || format == "float32") {
    store_values(values, master);
  } else if (values.defined()) {  // else the weight itself is the master, and remainders are 0
    store_beside(values, master);
  }
  drop_master(state);
  set_item(state, entry->entry, made);
  if (bumps) bump_version(tensor_of(param));  // its shard has advanced alone
}

bool drop_replaced(const Bits& bits, py::handle state) {
  bool any = false;
  if (!bits || !bits->has_replaced_any()) return any;
  for (const MasterEntry& each : master_entries()) {
    const py::handle found = item_of(state, each.entry);
    if (!is_tensor(found) || !bits->has_replaced(local_of(found))) continue;
    drop_item(state, each.entry);
    any = true;
  }
  return any;
}

void renew_masters(const py::list& groups, const py::dict& states) {
  static PyObject* const master = PyUnicode_InternFromString("master");
  for (const py::handle group : groups)
    for (const py::handle param : params_of(group)) {
      const Bits bits = is_tensor(param) ? low_bits_of(param) : nullptr;
      if (!bits || !bits->has_replaced_any()) continue;
      const py::handle state = item_of(states, param);
      if (!state || !PyDict_Check(state.ptr()) || !drop_replaced(bits, state)) continue;
      set_master(py::cast<std::string>(number_of(group, master)), param, state, {}, true);
      settle(group, local_of(param), state);
      // The other optimizers may step again, and must still show the same tensor.
      const at::Tensor made = master_beside(local_of(param), state);
      if (made.defined() && !bits->shows(made)) bits->note_replaced(made);
    }
}

void show_master(py::handle param, py::handle state, bool is_copy) {
  const at::Tensor weight = local_of(param);
  if (!is_low_precision(weight)) return;
  if (const at::Tensor second = master_beside(weight, state); second.defined()) {
    const Bits bits = make_low_bits(param);
    if (!is_copy || !bits->second().defined())
      bits->show(second, param);
    else if (!bits->shows(second))
      bits->note_replaced(second);
  }
}

void follow_master(py::handle param, const at::Tensor& weight, py::handle state) {
  const bool low = is_low_precision(weight);
  for (const MasterEntry& each : master_entries()) {
    const py::handle found = item_of(state, each.entry);
    if (!low || (each.weight && *each.weight != weight.scalar_type())) {
      drop_item(state, each.entry);
    } else if (is_tensor(found)) {
      const at::Tensor present = local_of(found), moved = placed(present, weight);
      if (moved.is_same(present)) continue;
      used_on_current_stream(present);  // maybe from another stream, and dropped here
      set_item(state, each.entry, like(moved, param));
    }
  }
}

}  // namespace amp_mp
