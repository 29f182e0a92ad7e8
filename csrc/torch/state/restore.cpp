// A file's states as an optimizer stores them, whatever their format in the file, and whichever
// library has saved them.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <cstring>
#include <deque>

#include "torch/bind.h"
#include "torch/python/unpack.h"
#include "torch/state/live_state.h"
#include "torch/state/saved_state.h"
#include "torch/weights/master_tensors.h"

namespace amp_mp {
namespace {

using Holds = SavedEntry::Holds;

// An entry of a file's state. entry: what the rules say of it; null if they have none of its name.
struct Given {
  py::object key, value;
  const SavedEntry* entry;
  bool holds(Holds what) const { return entry && entry->holds == what; }
  bool is_of_clock() const { return entry && entry->is_of_clock(); }
};

// One parameter, and what is known of it.
struct Restoring {
  const SavedEntries& entries;
  const py::dict saved;
  const py::object param;
  const py::handle group;
  const uint64_t seed;
  const int64_t index;
  const at::Tensor local = local_of(param);
  const std::vector<Given> all_given = given_in(entries, saved);
  py::dict state;

  static std::vector<Given> given_in(const SavedEntries& entries, const py::dict& saved) {
    std::vector<Given> found;
    found.reserve(saved.size());
    for (const auto& [key, value] : saved)
      found.push_back({py::reinterpret_borrow<py::object>(key),
                       py::reinterpret_borrow<py::object>(value), entries.find(text_of(key))});
    return found;
  }

  // Adds the bytes that its arrays will need on the host.
  void add_bytes(BytesByDevice& all) const {
    if (!offloads(group, local)) return;
    const int64_t count = local.numel();
    size_t& bytes = all[local.device().index()];
    for (const Given& given : all_given) {
      if (!given.holds(Holds::state) || !is_tensor(given.value)) continue;
      const Format format = format_beside(format_named(format_at(given.entry->state)), param);
      bytes += host_bytes(count, dtype_of(format));
      if (kFormats[int(format)].is(kGrouped))
        bytes += host_bytes(count / kGroup, second_dtype_of(format));
    }
    const MasterEntry* const master = master_entry(format_at("master"), param);
    if (!master) return;
    const int64_t elements = count / (is_packed(*master) ? kPacked : 1);
    for (const MasterEntry& each : master_entries())
      if (saved.contains(each.entry)) return void(bytes += host_bytes(elements, master->dtype));
  }

  // A state of new tensors in the file's order; the master comes last.
  py::dict restored() {
    const at::Tensor clock = new_clock();
    for (const Given& given : all_given) {
      if (given.holds(Holds::unused)) continue;
      if (clock.defined() && given.is_of_clock())
        add_to(clock, given);
      else
        add(given);
    }
    add_master();
    settle(group, local, state);
    return state;
  }

  std::string format_at(const std::string& name) const {
    return py::cast<std::string>(number_of(group, py::str(name)));
  }

  void set(py::handle key, const at::Tensor& part,
           const std::optional<std::vector<int64_t>>& shape = {}) {
    set_item(state, key, like(part, param, shape));
  }

  void add(const Given& given) {
    const auto& [key, value, entry] = given;
    if (!is_tensor(value)) return set_item(state, key, value);
    const at::Tensor& t = tensor_of(value);
    const at::IntArrayRef own_sizes = tensor_of(param).sizes();
    if (!entry && t.sizes() == own_sizes) {
      const at::Tensor part = part_of(value, param);
      set(key, copy_as(part, part.scalar_type(), local));
    } else if (!entry || entry->is_of_clock()) {
      const at::Tensor whole = whole_of(value);
      const at::Tensor copy = whole.to(local.device(), whole.scalar_type(), false, /*copy=*/true);
      set_item(state, key, wrapped(copy));
    } else if (entry->holds == Holds::rows) {
      const at::Tensor part = part_of(value, param);
      set(key, part.to(local.device(), at::kFloat, false, /*copy=*/true), t.sizes().vec());
    } else if (entry->holds == Holds::state) {
      add_state(*entry, value);
    }
  }

  void add_state(const SavedEntry& entry, const py::handle& value) {
    const ArrayTensors made = converted(param, format_named(format_at(entry.state)),
                                        arrays_of(entry, value), seed, index);
    const py::object name = entry_name(entry.state, made.format);
    set(name, made.data);
    if (made.second.defined())
      set(py::str(text_of(name) + "_scale"), made.second, second_shape(made.format, param));
  }

  // This process's part of a saved state; in float32 if the part cuts groups.
  ArrayTensors arrays_of(const SavedEntry& entry, const py::handle& value) const {
    if (entry.scale.empty()) {
      const at::Tensor data = part_of(value, param);
      if (!entry.format.empty()) return {data, format_named(entry.format), {}};
      const bool is_double = data.scalar_type() == at::kDouble;  // as torch may have saved it
      return {data, is_double ? Format::float32 : check_format(data, {"the state"}), {}};
    }
    const Format format = format_named(entry.format);
    const py::object scale = saved[py::str(entry.scale)];
    if (!is_dtensor(param)) return {whole_of(value), format, whole_of(scale)};
    const std::vector<int64_t> shape = second_shape(format, param);
    const bool fits = has_groups(format, param);
    if (fits && package().is_placed_as(value, param) && package().is_placed_as(scale, param) &&
        tensor_of(scale).sizes() == at::IntArrayRef(shape))
      return {local_of(value), format, local_of(scale)};
    const at::Tensor data = whole_of(value), scales = whole_of(scale);
    if (fits && data.is_contiguous())
      return {package().part_of_whole(data, param), format,
              package().part_of_whole(scales.reshape(shape), param)};
    return {package().part_of_whole(values_of({data, format, scales}), param), Format::float32, {}};
  }

  // Where the clock (core/rules/base.h) has one of its entries.
  static int64_t place_in_clock(const SavedEntry& entry) {
    return entry.holds == Holds::step ? 0 : 3;
  }

  // Memory for the whole clock in one piece, as a step keeps it; undefined unless the file has each
  // of the clock's entries once, in float64.
  at::Tensor new_clock() const {
    std::array<int, 4> found{};
    for (const Given& given : all_given) {
      if (!given.is_of_clock()) continue;
      if (!is_plain(given.value) || tensor_of(given.value).scalar_type() != at::kDouble) return {};
      ++found[size_t(place_in_clock(*given.entry))];
    }
    if (found != std::array{1, 0, 0, 1}) return {};
    return at::zeros({4}, local.options().dtype(at::kDouble));
  }

  void add_to(const at::Tensor& clock, const Given& given) {
    // No autograd graph holds a clock: its views need no version counter in common.
    const at::AutoDispatchBelowADInplaceOrView plain_views;
    const at::Tensor place = clock.select(0, place_in_clock(*given.entry));
    const at::Tensor& value = tensor_of(given.value);
    // torch's copy of one number takes a microsecond.
    if (value.is_cpu() && clock.is_cpu() && value.is_contiguous() && !value.is_neg())
      std::memcpy(place.mutable_data_ptr(), value.const_data_ptr(), place.nbytes());
    else
      place.copy_(value.detach().view(place.sizes()));
    set_item(state, given.key, wrapped(place));
  }

  // A file of torch has no master: the weight keeps its own.
  void add_master() {
    const MasterEntry* const wanted = master_entry(format_at("master"), param);
    if (!wanted) return;
    const std::vector<int64_t> shape = master_shape(tensor_of(param), wanted->dtype);
    for (const MasterEntry& each : master_entries()) {
      const py::handle value = item_of(saved, each.entry);
      if (!value) continue;
      const auto [entry, part] = master_part(each, value, param);
      if (entry == wanted) return set(entry->entry, part, shape);
      if (entry->weight && *entry->weight != local.scalar_type()) continue;
      const at::Tensor weight = local.detach();
      return set(wanted->entry, made_beside(*master_in(weight, part), weight, wanted->dtype),
                 shape);
    }
  }
};

// The new state of each parameter of these param_groups, of new tensors in the file's order; None
// if the file has none for it. wrong_state must have accepted the file's states. Each state is
// stored as its group says, with the same bits if the file's format is the same.
//
// seed: for stochastic rounding, if the file's groups have none. Python gathers parts of DTensors,
// on all processes in the same order.
py::list restored(const SavedEntries& entries, const py::list& groups, const py::dict& state_dict,
                  const py::int_& seed) {
  const at::NoGradGuard no_grad;
  const py::dict found = state_dict["state"];
  const py::list files = state_dict["param_groups"];
  py::list made;
  std::deque<Restoring> all;
  BytesByDevice bytes;
  for (size_t number = 0; number < groups.size(); ++number) {
    const py::dict file = files[number];
    const auto own_seed = py::cast<uint64_t>(file.contains("seed") ? file["seed"] : seed);
    const py::list params = params_of(groups[number]), numbers = file["params"];
    for (size_t i = 0; i < params.size(); ++i) {
      const py::object param = params[i];
      const py::object saved = found.attr("get")(numbers[i]);
      made.append(saved);
      if (!py::isinstance<py::dict>(saved) || py::len(saved) == 0) continue;
      all.emplace_back(entries, saved, param, groups[number].ptr(), own_seed,
                       int64_t(made.size()) - 1);
      all.back().add_bytes(bytes);
    }
  }
  const HostRoom room(bytes);
  for (Restoring& each : all) made[size_t(each.index)] = each.restored();
  return made;
}

}  // namespace

void bind_restore(py::module_& m) {
  m.def("restored", &restored, py::arg("entries"), py::arg("groups"), py::arg("state_dict"),
        py::arg("seed"));
}

}  // namespace amp_mp
