// The checks of a parameter's state, and its clock.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cmath>

#include "torch/step/state.h"

namespace amp_mp {

bool is_held(const KeptState& kept, PyObject* state) {
  return std::any_of(kept.formats.begin(), kept.formats.end(), [&](const StoredFormat& f) {
    return item_of(state, f.entry.ptr()) != nullptr;
  });
}

void refuse_state(const RuleLayout& layout, const Member& member) {
  PyObject* state = member.state.ptr();
  if (PyDict_Size(state) == 0) return;
  const auto check = [&](const py::object& entry) {
    PyObject* held = item_of(state, entry.ptr());
    if (!is_tensor(held)) return;
    const at::Tensor &t = THPVariable_Unpack(held), &param = THPVariable_Unpack(member.param.ptr());
    TORCH_CHECK_VALUE(t.sizes() == param.sizes(), member.label, " has shape ",
                      shape_text(param.sizes()), ", but its ", text_of(entry), " has shape ",
                      shape_text(t.sizes()),
                      ": a parameter of another shape starts anew, so drop its state with `del "
                      "optimizer.state[param]`");
    const bool plain = !member.is_dtensor && is_plain(held);
    const bool placed_alike =
        plain || py::cast<bool>(python_functions().is_placed_as(py::handle(held), member.param));
    TORCH_CHECK_VALUE(placed_alike, member.label, " and its ", text_of(entry),
                      " are not split over processes in the same way; put the state in with "
                      "load_state_dict, which moves it to where the parameter is");
  };
  for (const KeptState& kept : layout.states) {
    PyObject* first = nullptr;
    for (const StoredFormat& stored : kept.formats) {
      if (!item_of(state, stored.entry.ptr()) || stored.entry.ptr() == first) continue;
      TORCH_CHECK_VALUE(!first, "the state of ", member.label, " holds ", quoted(kept.name.ptr()),
                        " twice, as ", quoted(first), " and as ", quoted(stored.entry.ptr()),
                        "; remove one of them");
      first = stored.entry.ptr();
    }
  }
  for (const MasterEntry& master : layout.masters) check(master.entry);
  for (const KeptState& kept : layout.states) {
    PyObject* last = nullptr;
    for (const StoredFormat& stored : kept.formats)
      if (stored.entry.ptr() != last)
        check(py::reinterpret_borrow<py::object>(last = stored.entry.ptr()));
  }
  PyObject* step = item_of(state, layout.step.ptr());
  std::vector<std::string> missing;
  for (const KeptState& kept : layout.states)
    if (!kept.late && !is_held(kept, state)) missing.push_back(quoted(kept.name.ptr()));
  if (layout.own_is_kept && !item_of(state, layout.own.ptr()))
    missing.push_back(quoted(layout.own.ptr()));
  if (missing.empty() || !step || !(number_in(step) > 0)) return;
  TORCH_CHECK_VALUE(false, "the state of ", member.label, " has no ",
                    *std::min_element(missing.begin(), missing.end()),
                    ", though the parameter has taken steps; put it back, or clear the parameter's "
                    "whole state to start it anew");
}

at::Tensor clock_of(const RuleLayout& layout, PyObject* group, const Member& member) {
  PyObject* state = member.state.ptr();
  const at::Device device = member.local.device();
  PyObject* const entries[] = {item_of(state, layout.step.ptr()),
                               item_of(state, layout.powers.ptr()),
                               item_of(state, layout.own.ptr())};
  const auto lies_in_clock = [&] {
    const int64_t offsets[] = {0, 1, 3};
    if (!std::all_of(std::begin(entries), std::end(entries), is_tensor)) return false;
    const at::Tensor& first = THPVariable_Unpack(entries[0]);
    for (int i = 0; i < 3; ++i) {
      const at::Tensor& t = THPVariable_Unpack(entries[i]);
      if (t.scalar_type() != at::kDouble || t.device() != device || !t.has_storage() ||
          t.storage_offset() - first.storage_offset() != offsets[i] ||
          t.storage().unsafeGetStorageImpl() != first.storage().unsafeGetStorageImpl())
        return false;
    }
    return true;
  };
  if (lies_in_clock()) return THPVariable_Unpack(entries[0]).as_strided({4}, {1});
  static PyObject* const buffer = PyUnicode_InternFromString("momentum_buffer");
  static PyObject* const betas_key = PyUnicode_InternFromString("betas");
  // torch's SGD counts no steps: a momentum buffer says that there was at least one.
  const bool has_buffer =
      std::any_of(layout.states.begin(), layout.states.end(), [&](const KeptState& kept) {
        return kept.name.is(py::handle(buffer)) && is_held(kept, state);
      });
  double numbers[4] = {entries[0] ? number_in(entries[0]) : double(has_buffer), 0, 0,
                       entries[2] ? number_in(entries[2]) : layout.own_start};
  PyObject* betas = item_of(group, betas_key);
  if (is_tensor(entries[1])) {
    at::Tensor powers = local_of(entries[1]);
    if (!powers.is_cpu() || powers.scalar_type() != at::kDouble || !powers.is_contiguous())
      powers = powers.to(at::kCPU, at::kDouble).contiguous();
    TORCH_CHECK_VALUE(powers.numel() == 2, member.label, ": ", text_of(layout.powers),
                      " must be two numbers, found ", describe(powers));
    std::copy_n(powers.const_data_ptr<double>(), 2, numbers + 1);
  } else {
    for (int i = 0; i < 2; ++i) {
      const double beta = betas ? number_in(owned(PySequence_GetItem(betas, i)).ptr()) : 0.0;
      numbers[1 + i] = std::pow(beta, numbers[0]);
    }
  }
  // No autograd graph holds a clock: its views need no version counter in common.
  const at::AutoDispatchBelowADInplaceOrView plain_views;
  at::Tensor clock = at::from_blob(numbers, {4}, at::TensorOptions().dtype(at::kDouble));
  clock = device.is_cpu() ? clock.clone() : clock.to(device);
  set_item(state, layout.step, wrapped(clock.select(0, 0)));
  set_item(state, layout.powers, wrapped(clock.narrow(0, 1, 2)));
  set_item(state, layout.own, wrapped(clock.select(0, 3)));
  return clock;
}

}  // namespace amp_mp
