// The checks of a parameter's state, and its clock.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "torch/muon/row_norms.h"
#include "torch/state/live_state.h"

namespace amp_mp {

bool is_held(const KeptState& kept, PyObject* state) {
  return std::any_of(kept.formats.begin(), kept.formats.end(), [&](const StoredFormat& f) {
    return item_of(state, f.entry.ptr()) != nullptr;
  });
}

bool has_shape_of(at::IntArrayRef sizes, at::IntArrayRef param, bool of_rows) {
  if (!of_rows) return sizes == param;
  return sizes == at::IntArrayRef(muon::row_sizes(param, false)) ||
         sizes == at::IntArrayRef(muon::row_sizes(param, true));
}

void refuse_state(const Member& member) {
  const RuleLayout& layout = *member.layout;
  PyObject* state = member.state.ptr();
  if (PyDict_Size(state) == 0) return;
  const auto check = [&](const py::object& entry, bool of_rows) {
    PyObject* held = item_of(state, entry.ptr());
    if (!is_tensor(held)) return;
    const at::Tensor &t = THPVariable_Unpack(held), &param = THPVariable_Unpack(member.param.ptr());
    TORCH_CHECK_VALUE(
        has_shape_of(t.sizes(), param.sizes(), of_rows), member.label, " has shape ",
        shape_text(param.sizes()), ", but its ", text_of(entry), " has shape ",
        shape_text(t.sizes()),
        ": a parameter of another shape starts from the beginning; drop its state with "
        "`del optimizer.state[param]`");
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
  for (const MasterEntry& master : master_entries()) check(master.entry, false);
  for (const KeptState& kept : layout.states) {
    PyObject* last = nullptr;
    for (const StoredFormat& stored : kept.formats)
      if (stored.entry.ptr() != last)
        check(py::reinterpret_borrow<py::object>(last = stored.entry.ptr()), kept.of_rows);
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
                    "whole state, and it starts from the beginning");
}

namespace {

// The clock of a parameter whose three entries lie side by side in memory; else undefined.
at::Tensor present_clock(const Member& member) {
  PyObject* state = member.state.ptr();
  const py::object* const keys[] = {&member.layout->step, &member.layout->powers,
                                    &member.layout->own};
  const int64_t offsets[] = {0, 1, 3};
  at::Tensor first;
  for (int i = 0; i < 3; ++i) {
    PyObject* entry = item_of(state, keys[i]->ptr());
    if (!is_tensor(entry)) return {};
    const at::Tensor& t = THPVariable_Unpack(entry);
    if (i == 0) first = t;
    if (t.scalar_type() != at::kDouble || t.device() != member.local.device() || !t.has_storage() ||
        !first.has_storage() || t.storage_offset() - first.storage_offset() != offsets[i] ||
        t.storage().unsafeGetStorageImpl() != first.storage().unsafeGetStorageImpl())
      return {};
  }
  return first.as_strided({4}, {1});
}

std::array<double, 4> clock_numbers(const Member& member) {
  const RuleLayout& layout = *member.layout;
  PyObject* state = member.state.ptr();
  PyObject *const step = item_of(state, layout.step.ptr()),
                  *const held = item_of(state, layout.powers.ptr()),
                  *const own = item_of(state, layout.own.ptr());
  static PyObject* const buffer = PyUnicode_InternFromString("momentum_buffer");
  static PyObject* const betas_key = PyUnicode_InternFromString("betas");
  // torch's SGD and Muon count no steps: a momentum buffer says that there was at least one.
  const bool has_buffer =
      std::any_of(layout.states.begin(), layout.states.end(), [&](const KeptState& kept) {
        return kept.name.is(py::handle(buffer)) && is_held(kept, state);
      });
  std::array<double, 4> numbers = {step ? number_in(step) : double(has_buffer), 0, 0,
                                   own ? number_in(own) : layout.own_start};
  if (is_tensor(held)) {
    const at::Tensor powers = doubles_on_host(local_of(held));
    TORCH_CHECK_VALUE(powers.numel() == 2, member.label, ": ", text_of(layout.powers),
                      " must be two numbers, found ", describe(powers));
    std::copy_n(powers.const_data_ptr<double>(), 2, numbers.begin() + 1);
    return numbers;
  }
  PyObject* betas = item_of(member.group.ptr(), betas_key);
  for (int i = 0; i < 2; ++i) {
    const double beta = betas ? number_in(number_at(betas, i, betas_key).ptr()) : 0.0;
    numbers[size_t(1 + i)] = std::pow(beta, numbers[0]);
  }
  return numbers;
}

}  // namespace

Tensors clocks_of(const std::vector<Member>& members) {
  Tensors clocks;
  std::vector<size_t> missing;
  std::vector<std::array<double, 4>> numbers;
  for (const Member& member : members) {
    clocks.push_back(present_clock(member));
    if (clocks.back().defined()) continue;
    missing.push_back(clocks.size() - 1);
    numbers.push_back(clock_numbers(member));
  }
  if (missing.empty()) return clocks;
  // No autograd graph holds a clock: its views need no version counter in common.
  const at::AutoDispatchBelowADInplaceOrView plain_views;
  const at::Tensor here = at::from_blob(numbers.data(), {int64_t(missing.size()), 4}, at::kDouble);
  at::Tensor there;  // one copy to each device, however many clocks
  for (size_t k = 0; k < missing.size(); ++k) {
    const Member& member = members[missing[k]];
    const at::Device device = member.local.device();
    if (device.is_cuda() && (!there.defined() || there.device() != device)) there = here.to(device);
    const at::Tensor clock =
        device.is_cuda() ? there.select(0, int64_t(k)) : here.select(0, int64_t(k)).clone();
    const py::dict& state = member.state;
    set_item(state.ptr(), member.layout->step, wrapped(clock.select(0, 0)));
    set_item(state.ptr(), member.layout->powers, wrapped(clock.narrow(0, 1, 2)));
    set_item(state.ptr(), member.layout->own, wrapped(clock.select(0, 3)));
    clocks[missing[k]] = clock;
  }
  return clocks;
}

}  // namespace amp_mp
