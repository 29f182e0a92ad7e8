#include "torch/state/live_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>

#include "torch/device.h"
#include "torch/muon/row_norms.h"
#include "torch/ops.h"
#include "torch/python/unpack.h"

namespace amp_mp {
namespace {

const StoredFormat& stored_as(const KeptState& kept, Format format) {
  for (const StoredFormat& stored : kept.formats)
    if (stored.format == format) return stored;
  TORCH_CHECK(false, "amp_mp: a state cannot be stored as ", kFormats[int(format)].name);
}

Format stored_format(const KeptState& kept, const Member& member) {
  const auto name =
      py::cast<std::string>(py::handle(number_of(member.group.ptr(), kept.name.ptr())));
  return format_beside(format_named(name), member.param.ptr());
}

// Puts a state's tensors, plain ones, into the parameter's state in place of those before.
void store(const KeptState& kept, const StoredFormat& stored, const Member& member,
           const at::Tensor& data, const at::Tensor& scales) {
  PyObject* state = member.state.ptr();
  for (const StoredFormat& other : kept.formats) {
    drop_item(state, other.entry);
    if (!other.scales.is_none()) drop_item(state, other.scales);
  }
  set_item(state, stored.entry, like(data, member.param.ptr()));
  if (!scales.defined()) return;
  PyObject* param = member.param.ptr();
  const py::object shape =
      member.is_dtensor ? py::object(py::cast(scale_shape(param))) : py::none();
  set_item(state, stored.scales, like(scales, param, shape));
}

// A number for each row of a parameter's matrices; rows are whole on a process.
void make_rows(const KeptState& kept, const Member& member) {
  static PyObject* const flatten = PyUnicode_InternFromString("flatten");
  PyObject* const param = member.param.ptr();
  const at::IntArrayRef sizes = THPVariable_Unpack(param).sizes();
  const bool flattened = truth_of(number_of(member.group.ptr(), flatten), flatten);
  const std::vector<int64_t> whole = muon::row_sizes(sizes, flattened),
                             local = muon::row_sizes(member.local.sizes(), flattened);
  if (member.is_dtensor) {
    const auto counts =
        py::cast<std::vector<int64_t>>(python_functions().shards_of(py::handle(param)));
    for (size_t d = 0; d < sizes.size(); ++d)
      TORCH_CHECK_VALUE(
          counts[d] <= 1 || whole[d] == sizes[d], member.label, " of shape ", shape_text(sizes),
          " is split along its columns over processes, and "
          "normalize=\"rows\" needs whole rows; shard it along its first dimension, or "
          "set normalize=None in its param_group");
  }
  const at::Tensor zeros = at::zeros(local, member.local.options().dtype(at::kFloat));
  const py::object shape = member.is_dtensor ? py::object(py::tuple(py::cast(whole))) : py::none();
  set_item(member.state.ptr(), kept.name, like(zeros, param, shape));
}

void make_state(const KeptState& kept, const Member& member) {
  if (kept.of_rows) return make_rows(kept, member);
  const StoredFormat& stored = stored_as(kept, stored_format(kept, member));
  const auto [data, scales] = new_arrays(stored.format, member.param.ptr());
  store(kept, stored, member, data, scales);
  PyObject* const initial =
      kept.initial.is_none() ? nullptr : item_of(member.group.ptr(), kept.initial.ptr());
  const double start = initial ? PyFloat_AsDouble(initial) : 0;
  if (start == -1 && PyErr_Occurred()) throw py::error_already_set();
  if (start == 0) return;
  const Format format = native(stored.format);
  store_values(at::full_like(data, start, data.options().dtype(at::kFloat)), data, scales, format,
               0, 0, origin_for(member.param.ptr(), format));
}

// Moves one state; one stored in groups of neighbours is stored again in another layout.
void bring(const KeptState& kept, const HeldState& held, const Member& member) {
  const Format wanted = stored_format(kept, member);
  at::Tensor data, scales;
  if (kept.of_rows) {
    if (held.data.device() == member.local.device()) return;
    PyObject* const old = item_of(member.state.ptr(), kept.name.ptr());
    used_on_current_stream(held.data);
    const py::tuple shape = py::cast(THPVariable_Unpack(old).sizes().vec());
    return set_item(member.state.ptr(), kept.name,
                    like(held.data.to(member.local.device()), member.param.ptr(), shape));
  }
  if (held.stored->format == wanted &&
      (!held.scales.defined() || lies_like(held.data, member.local))) {
    data = placed(held.data, member.local);
    if (held.scales.defined()) scales = held.scales.to(member.local.device());
    const bool moved =
        !data.is_same(held.data) || (scales.defined() && !scales.is_same(held.scales));
    if (!moved) return;
  } else {
    static PyObject* const seed = PyUnicode_InternFromString("seed");
    const at::Tensor values =
        values_of(held.data.detach(), held.scales, native(held.stored->format));
    std::tie(data, scales) =
        encoded(values, native(wanted), member.param.ptr(),
                py::cast<uint64_t>(py::handle(number_of(member.group.ptr(), seed))));
  }
  used_on_current_stream(held.data);
  used_on_current_stream(held.scales);
  store(kept, stored_as(kept, wanted), member, data, scales);
}

// Bytes of what the state will have on the host and has not there yet. Rows make their own room.
size_t lacking(const Member& member) {
  const at::Tensor& local = member.local;
  size_t bytes = 0;
  const auto add = [&](const py::object& entry, at::ScalarType dtype, int64_t count) {
    PyObject* const found = item_of(member.state.ptr(), entry.ptr());
    const at::Tensor held = is_tensor(found) ? local_of(found) : local;
    const bool is_there = is_on_host(held) && held.device() == local.device();
    if (held.scalar_type() != dtype || !is_there) bytes += host_bytes(count, dtype);
  };
  for (const KeptState& kept : member.layout->states) {
    if (kept.of_rows) continue;
    const StoredFormat& stored = stored_as(kept, stored_format(kept, member));
    add(stored.entry, stored.dtype, local.numel());
    if (stored.scales.is_none()) continue;
    add(stored.scales, rest_dtype_of(stored.format), local.numel() / kGroup);
  }
  if (!is_low_precision(local)) return bytes;
  const std::string format = text_of(member.group["master"]);
  if (const MasterEntry* const entry = master_entry(format, local.scalar_type()))
    add(entry->entry, entry->dtype, local.numel());
  return bytes;
}

}  // namespace

Format format_of(const KeptState& kept, const Member& member) {
  return native(stored_format(kept, member));
}

std::optional<HeldState> held_state(const KeptState& kept, PyObject* state) {
  PyObject* seen = nullptr;
  for (const StoredFormat& stored : kept.formats) {
    PyObject* data = item_of(state, stored.entry.ptr());
    if (!is_tensor(data)) continue;
    seen = data;
    const at::Tensor local = local_of(data);
    if (local.scalar_type() != stored.dtype) continue;
    at::Tensor scales;
    if (!stored.scales.is_none())
      if (PyObject* found = item_of(state, stored.scales.ptr())) scales = local_of(found);
    return HeldState{&stored, local, scales};
  }
  if (!seen) return std::nullopt;
  return HeldState{nullptr, local_of(seen), {}};
}

void follow(const Member& member) {
  if (PyDict_Size(member.state.ptr()) == 0) return;
  const at::NoGradGuard no_grad;
  follow_master(member.param.ptr(), member.local, member.state.ptr());
  for (const KeptState& kept : member.layout->states) {
    const std::optional<HeldState> held = held_state(kept, member.state.ptr());
    if (held && held->stored) bring(kept, *held, member);
  }
  settle(member.group.ptr(), member.local, member.state.ptr());
}

void init_state(const Member& member) {
  static PyObject* const master = PyUnicode_InternFromString("master");
  const at::NoGradGuard no_grad;
  for (const KeptState& kept : member.layout->states)
    if (!is_held(kept, member.state.ptr())) make_state(kept, member);
  if (is_low_precision(member.local)) {
    const auto format = py::cast<std::string>(py::handle(number_of(member.group.ptr(), master)));
    set_master(format, member.param.ptr(), member.state.ptr(), {});
  }
  settle(member.group.ptr(), member.local, member.state.ptr());
}

HostRoom room_for(const std::vector<Member>& members) {
  BytesByDevice bytes;
  for (const Member& member : members)
    if (offloads(member.group.ptr(), member.local))
      bytes[member.local.device().index()] += lacking(member);
  const py::gil_scoped_release release;  // pinning takes seconds where it is much
  return HostRoom(bytes);
}

bool offloads(PyObject* group, const at::Tensor& local) {
  PyObject* const found = local.is_cuda() ? PyDict_GetItemString(group, "offload") : nullptr;
  return found && text_of(found) == "state";
}

void settle(PyObject* group, const at::Tensor& local, PyObject* state) {
  if (!local.is_cuda()) return;
  const bool away = offloads(group, local);
  const auto held = py::reinterpret_steal<py::dict>(PyDict_Copy(state));
  for (const auto& [key, value] : held) {
    if (!is_tensor(value.ptr())) continue;
    const at::Tensor array = local_of(value.ptr());
    const bool belongs = away && host_bytes(array.numel(), array.scalar_type()) > 0;
    if (array.device() != local.device() || is_on_host(array) == belongs) continue;
    used_on_current_stream(array);
    const at::Tensor moved = belongs ? copy_to_host(array) : array.clone();
    set_item(state, py::reinterpret_borrow<py::object>(key), like(moved, value.ptr()));
  }
}

}  // namespace amp_mp
