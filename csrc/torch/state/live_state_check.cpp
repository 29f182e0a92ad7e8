// The checks of a parameter's state, and its clock.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <array>

#include "torch/muon/row_norms.h"
#include "torch/state/live_state.h"
#include "torch/weights/master_tensors.h"

namespace amp_mp {

bool is_held(const KeptState& kept, py::handle state) {
  return std::any_of(kept.formats.begin(), kept.formats.end(),
                     [&](const StoredFormat& f) { return bool(item_of(state, f.entry)); });
}

bool has_shape_of(at::IntArrayRef sizes, at::IntArrayRef param, bool of_rows) {
  if (!of_rows) return sizes == param;
  return sizes == at::IntArrayRef(muon::row_sizes(param, false)) ||
         sizes == at::IntArrayRef(muon::row_sizes(param, true));
}

namespace {

void check_state(const Member& member) {
  const RuleLayout& layout = *member.layout;
  const py::object& state = member.state;
  if (PyDict_Size(state.ptr()) == 0) return;
  const auto check = [&](const py::object& entry, const auto& has_its_shape) {
    const py::handle held = item_of(state, entry);
    if (!is_tensor(held)) return;
    const at::Tensor &t = tensor_of(held), &param = tensor_of(member.param);
    TORCH_CHECK_VALUE(
        has_its_shape(t, param), member.label, " has shape ", shape_text(param.sizes()),
        ", but its ", text_of(entry), " has shape ", shape_text(t.sizes()),
        ": a parameter of another shape starts from the beginning; drop its state with "
        "`del optimizer.state[param]`");
    const bool plain = !member.is_dtensor && is_plain(held);
    TORCH_CHECK_VALUE(plain || package().is_placed_as(held, member.param), member.label,
                      " and its ", text_of(entry),
                      " are not split over processes in the same way; put the state in with "
                      "load_state_dict, which moves it to where the parameter is");
  };
  for (const MasterEntry& master : master_entries()) {
    const py::handle held = item_of(state, master.entry);
    const bool is_earlier = is_tensor(held) && local_of(held).numel() == 0;
    if (is_earlier) continue;  // it is empty: weights/weight.h
    check(master.entry, [&](const at::Tensor& t, const at::Tensor& param) {
      return t.sizes() == at::IntArrayRef(master_shape(param, master.dtype));
    });
    if (is_tensor(held))
      check_plain(local_of(held), {"the master", member.tensor_index, &member.label});
  }
  std::vector<std::string> missing;
  for (const KeptState& kept : layout.states) {
    py::handle first;
    for (const StoredFormat& stored : kept.formats) {
      if (stored.entry.is(first) || !item_of(state, stored.entry)) continue;
      TORCH_CHECK_VALUE(!first, "the state of ", member.label, " holds ", repr_of(kept.name),
                        " twice, as ", repr_of(first), " and as ", repr_of(stored.entry),
                        "; remove one of them");
      first = stored.entry;
      check(stored.entry, [&](const at::Tensor& t, const at::Tensor& param) {
        return has_shape_of(t.sizes(), param.sizes(), kept.of_rows);
      });
    }
    if (!first && !kept.late) missing.push_back(repr_of(kept.name));
  }
  if (!layout.own_is_late && !item_of(state, layout.own)) missing.push_back(repr_of(layout.own));
  const py::handle step = item_of(state, layout.step);
  if (missing.empty() || !step || !(number_in(step) > 0)) return;
  TORCH_CHECK_VALUE(false, "the state of ", member.label, " has no ",
                    *std::min_element(missing.begin(), missing.end()),
                    ", though the parameter has taken steps; put it back, or clear the parameter's "
                    "whole state, and it starts from the beginning");
}

// The parameter's clock if its two entries lie in one piece of memory; else undefined.
at::Tensor present_clock(const Member& member) {
  const py::object* const keys[] = {&member.layout->step, &member.layout->own};
  const int64_t offsets[] = {0, 3};
  at::Tensor first;
  for (int i = 0; i < 2; ++i) {
    const py::handle entry = item_of(member.state, *keys[i]);
    if (!is_tensor(entry)) return {};
    const at::Tensor& t = tensor_of(entry);
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
  const py::object& state = member.state;
  const py::handle step = item_of(state, layout.step), own = item_of(state, layout.own);
  static PyObject* const buffer = PyUnicode_InternFromString("momentum_buffer");
  // torch's SGD and Muon count no steps: with a momentum buffer there was at least one.
  const bool has_buffer =
      std::any_of(layout.states.begin(), layout.states.end(), [&](const KeptState& kept) {
        return kept.name.is(py::handle(buffer)) && is_held(kept, state);
      });
  return {step ? number_in(step) : double(has_buffer), 0, 0,
          own ? number_in(own) : layout.own_start};
}

// ValueError for a parameter of a dtype beside which no master is stored as its group says.
void refuse_master(py::handle group, const at::Tensor& t, const std::string& label) {
  static PyObject* const master = PyUnicode_InternFromString("master");
  const std::string format = text_of(number_of(group, master));
  TORCH_CHECK_VALUE(
      !is_low_precision(t) || format == "none" || master_entry(format, t.scalar_type()), label,
      " is ", text_of(py::cast(t.scalar_type())), ", and master=\"", format,
      "\" (memory=\"nano\") is for bfloat16 parameters; take master=\"split24\" "
      "(memory=\"micro\") for it");
}

// Whether a step can update a parameter, as far as native code knows. any_sharded: whether there
// are modules of fully_shard, which gather parameters for a while; only Python can tell those.
bool is_steppable(py::handle param, bool any_sharded) {
  if (!is_plain(param) || any_sharded) return false;
  const at::Tensor& t = tensor_of(param);
  return (t.is_cpu() || t.is_cuda()) && (t.scalar_type() == at::kFloat || is_low_precision(t));
}

}  // namespace

void check_members(const std::vector<Member>& members) {
  const bool any_sharded = package().has_sharded_modules();
  for (const Member& member : members) {
    if (!is_steppable(member.param, any_sharded))
      package().refuse_param(member.param, member.label);
    refuse_master(member.group, member.local, member.label);
    check_state(member);
  }
}

void refuse_params(py::handle group, int64_t number) {
  const bool any_sharded = package().has_sharded_modules();
  int64_t position = 0;
  for (const py::handle param : params_of(group)) {
    const int64_t own = position++;
    const at::Tensor& t = tensor_of(param);
    if (!t.requires_grad() && !t.is_meta()) continue;  // a frozen one may have any dtype
    if (!is_steppable(param, any_sharded))
      package().refuse_param(param, param_label(group, number, own));
    refuse_master(group, t, param_label(group, number, own));
  }
}

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
    set_item(member.state, member.layout->step, wrapped(clock.select(0, 0)));
    set_item(member.state, member.layout->own, wrapped(clock.select(0, 3)));
    clocks[missing[k]] = clock;
  }
  return clocks;
}

}  // namespace amp_mp
