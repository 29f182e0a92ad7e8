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
  const auto name = py::cast<std::string>(number_of(member.group, kept.name));
  return format_beside(format_named(name), member.param);
}

// Puts a state's plain tensors into the parameter's state, and drops its present ones.
void store(const KeptState& kept, const Member& member, const ArrayTensors& arrays) {
  for (const StoredFormat& other : kept.formats) {
    drop_item(member.state, other.entry);
    if (!other.scales.is_none()) drop_item(member.state, other.scales);
  }
  const StoredFormat& stored = stored_as(kept, arrays.format);
  set_item(member.state, stored.entry, like(arrays.data, member.param));
  if (arrays.second.defined())
    set_item(member.state, stored.scales,
             like(arrays.second, member.param, second_shape(arrays.format, member.param)));
}

// Makes the numbers for the rows of a parameter's matrices; every row must be whole on its process.
void make_rows(const KeptState& kept, const Member& member) {
  static PyObject* const flatten = PyUnicode_InternFromString("flatten");
  const at::IntArrayRef sizes = tensor_of(member.param).sizes();
  const bool flattened = truth_of(number_of(member.group, flatten), flatten);
  const std::vector<int64_t> whole = muon::row_sizes(sizes, flattened),
                             local = muon::row_sizes(member.local.sizes(), flattened);
  if (member.is_dtensor) {
    const std::vector<int64_t> counts = package().shards_of(member.param);
    for (size_t d = 0; d < sizes.size(); ++d)
      TORCH_CHECK_VALUE(
          counts[d] <= 1 || whole[d] == sizes[d], member.label, " of shape ", shape_text(sizes),
          " is split along its columns over processes, and "
          "normalize=\"rows\" needs whole rows; shard it along its first dimension, or "
          "set normalize=None in its param_group");
  }
  const at::Tensor zeros = at::zeros(local, member.local.options().dtype(at::kFloat));
  set_item(member.state, kept.name, like(zeros, member.param, whole));
}

void make_state(const KeptState& kept, const Member& member) {
  if (kept.of_rows) return make_rows(kept, member);
  ArrayTensors made = new_arrays(stored_format(kept, member), member.param);
  store(kept, member, made);
  const py::handle initial =
      kept.initial.is_none() ? py::handle() : item_of(member.group, kept.initial);
  const double start = initial ? number_in(initial) : 0;
  if (start == 0) return;
  made.format = native(made.format);
  store_values(at::full_like(made.data, start, made.data.options().dtype(at::kFloat)), made, 0, 0,
               origin_for(member.param, made.format));
}

// Moves one state; stores one in groups again if the layout is another, as groups are of
// neighbours.
void bring(const KeptState& kept, const HeldState& held, const Member& member) {
  const at::Device device = member.local.device();
  if (kept.of_rows) {
    if (held.data.device() == device) return;
    used_on_current_stream(held.data);
    const auto shape = tensor_of(item_of(member.state, kept.name)).sizes().vec();
    return set_item(member.state, kept.name, like(held.data.to(device), member.param, shape));
  }
  ArrayTensors made = {held.data, stored_format(kept, member), held.scales};
  if (held.stored->format == made.format &&
      (!held.scales.defined() || same_layout(held.data, member.local))) {
    made.data = placed(held.data, member.local);
    if (held.scales.defined()) made.second = held.scales.to(device);
    if (made.data.is_same(held.data) && made.second.is_same(held.scales)) return;
  } else {
    static PyObject* const seed = PyUnicode_InternFromString("seed");
    const Format wanted = made.format;
    made = encoded(values_of({held.data.detach(), held.stored->format, held.scales}),
                   native(wanted), member.param, py::cast<uint64_t>(number_of(member.group, seed)));
    made.format = wanted;
  }
  used_on_current_stream(held.data);
  used_on_current_stream(held.scales);
  store(kept, member, made);
}

// Bytes that the state will have on the host and has not there yet. Numbers of rows need no room.
size_t lacking(const Member& member) {
  const at::Tensor& local = member.local;
  size_t bytes = 0;
  const auto add = [&](const at::Tensor& held, at::ScalarType dtype, int64_t count) {
    const bool is_there = held.defined() && is_on_host(held) && held.device() == local.device();
    if (!is_there || held.scalar_type() != dtype) bytes += host_bytes(count, dtype);
  };
  const auto in_state = [&](const py::object& entry) {
    const py::handle found = item_of(member.state, entry);
    return is_tensor(found) ? local_of(found) : at::Tensor();
  };
  for (const KeptState& kept : member.layout->states) {
    if (kept.of_rows) continue;
    const StoredFormat& stored = stored_as(kept, stored_format(kept, member));
    add(in_state(stored.entry), stored.dtype, local.numel());
    if (stored.scales.is_none()) continue;
    add(in_state(stored.scales), second_dtype_of(stored.format), local.numel() / kGroup);
  }
  if (const MasterEntry* const entry = wanted_master(member))
    add(master_of(member.param), entry->dtype, local.numel() / (is_packed(*entry) ? kPacked : 1));
  return bytes;
}

}  // namespace

Format format_of(const KeptState& kept, const Member& member) {
  return native(stored_format(kept, member));
}

std::optional<HeldState> held_state(const KeptState& kept, py::handle state) {
  py::handle seen;
  for (const StoredFormat& stored : kept.formats) {
    const py::handle data = item_of(state, stored.entry);
    if (!is_tensor(data)) continue;
    seen = data;
    const at::Tensor local = local_of(data);
    if (local.scalar_type() != stored.dtype) continue;
    at::Tensor scales;
    if (!stored.scales.is_none())
      if (const py::handle found = item_of(state, stored.scales)) scales = local_of(found);
    return HeldState{&stored, local, scales};
  }
  if (!seen) return std::nullopt;
  return HeldState{nullptr, local_of(seen), {}};
}

void follow(const Member& member) {
  if (PyDict_Size(member.state.ptr()) == 0) return;
  const at::NoGradGuard no_grad;
  for (const KeptState& kept : member.layout->states) {
    const std::optional<HeldState> held = held_state(kept, member.state);
    if (held && held->stored) bring(kept, *held, member);
  }
  settle(member.group, member.local, member.state);
}

const MasterEntry* wanted_master(const Member& member) {
  static PyObject* const master = PyUnicode_InternFromString("master");
  return master_entry(py::cast<std::string>(number_of(member.group, master)), member.param);
}

WeightRecord init_state(const Member& member, bool stepping) {
  const at::NoGradGuard no_grad;
  for (const KeptState& kept : member.layout->states)
    if (!is_held(kept, member.state)) make_state(kept, member);
  WeightRecord record;
  if (const MasterEntry* const entry = wanted_master(member)) {
    if (member.is_dtensor && !weight_of(member.param)) package().refuse_lost(member.param);
    record = weight_at(member.param);
    const at::Tensor master = record->master_for(member.tensors(), entry->dtype, stepping);
    const at::Tensor there = settled(member.group, member.local, master);
    if (!there.is_same(master)) record->move_master(there);
  }
  put_entry(record, member.param, member.state);
  if (!record)  // then a master that no other optimizer has would only take memory
    if (const WeightRecord earlier = weight_of(member.param); earlier && !earlier->is_held())
      earlier->drop();
  settle(member.group, member.local, member.state);
  return record;
}

HostRoom room_for(const std::vector<Member>& members) {
  BytesByDevice bytes;
  for (const Member& member : members)
    if (offloads(member.group, member.local))
      bytes[member.local.device().index()] += lacking(member);
  const py::gil_scoped_release release;  // pinning much memory takes seconds
  return HostRoom(bytes);
}

bool offloads(py::handle group, const at::Tensor& local) {
  PyObject* const found = local.is_cuda() ? PyDict_GetItemString(group.ptr(), "offload") : nullptr;
  return found && text_of(found) == "state";
}

at::Tensor settled(py::handle group, const at::Tensor& local, const at::Tensor& array) {
  if (!local.is_cuda() || array.device() != local.device()) return array;
  const bool belongs = offloads(group, local) && host_bytes(array.numel(), array.scalar_type()) > 0;
  if (is_on_host(array) == belongs) return array;
  used_on_current_stream(array);
  return belongs ? copy_to_host(array) : array.clone();
}

void settle(py::handle group, const at::Tensor& local, py::handle state) {
  if (!local.is_cuda()) return;
  const auto held = py::reinterpret_steal<py::dict>(PyDict_Copy(state.ptr()));
  for (const auto& [key, value] : held) {
    if (!is_tensor(value)) continue;
    const at::Tensor array = local_of(value), there = settled(group, local, array);
    if (!there.is_same(array)) set_item(state, key, like(there, value));
  }
}

}  // namespace amp_mp
