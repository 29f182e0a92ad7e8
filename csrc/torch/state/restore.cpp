// States of a file as an optimizer stores them: the one way to restore them, whatever their format
// and whichever library saved them.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include "torch/bind.h"
#include "torch/python/unpack.h"
#include "torch/state/live_state.h"
#include "torch/state/saved_state.h"

namespace amp_mp {
namespace {

using Like = SavedEntry::Like;

at::Tensor whole_of(const py::handle& value) {
  if (is_plain(value.ptr())) return THPVariable_Unpack(value.ptr()).detach();
  return py::cast<at::Tensor>(python_functions().whole(value));
}

// This process's part of a tensor that is split as the parameter is, or could be.
at::Tensor part_of(const py::handle& value, const py::handle& param) {
  if (is_plain(value.ptr()) && !is_dtensor(param.ptr()))
    return THPVariable_Unpack(value.ptr()).detach();
  return py::cast<at::Tensor>(python_functions().part(value, param));
}

at::Tensor part_of_whole(const at::Tensor& value, const py::handle& param) {
  return py::cast<at::Tensor>(python_functions().part_of_whole(value, param));
}

// One parameter, and what is known of it.
class Restoring {
 public:
  Restoring(const SavedEntries& entries, const py::dict& saved, const py::object& param,
            PyObject* group, uint64_t seed, int64_t index, PyObject* old)
      : entries_(entries),
        saved_(saved),
        param_(param),
        local_(local_of(param.ptr())),
        group_(group),
        seed_(seed),
        index_(index),
        old_(old) {}

  // Adds what its arrays will take on the host.
  void add_bytes(BytesByDevice& all) const {
    if (!offloads(group_, local_)) return;
    const int64_t count = local_.numel();
    size_t& bytes = all[local_.device().index()];
    for (const auto& [key, value] : saved_) {
      const SavedEntry* const entry = entries_.find(text_of(key));
      const bool is_array = entry && entry->like == Like::param && is_tensor(value.ptr());
      if (!is_array || entry->state == "master") continue;
      const Format format = format_beside(format_named(format_at(entry->state)), param_.ptr());
      bytes += host_bytes(count, dtype_of(format));
      if (kFormats[int(format)].is(kGrouped))
        bytes += host_bytes(count / kGroup, rest_dtype_of(format));
    }
    const MasterEntry* const master = master_entry(format_at("master"), local_.scalar_type());
    if (!master || !is_low_precision(local_)) return;
    for (const MasterEntry& each : master_entries())
      if (saved_.contains(each.entry) || (old_ && item_of(old_, each.entry.ptr())))
        return void(bytes += host_bytes(count, master->dtype));
  }

  py::dict restored(py::list undo) {
    join_clock();
    for (const auto& [key, value] : saved_) add(key, value);
    add_master(undo);
    // The entries that the file has, too, in its order.
    py::dict ordered;
    for (const auto& [key, value] : state_)
      if (!saved_.contains(key)) ordered[key] = value;
    for (const auto& [key, value] : saved_)
      if (state_.contains(key)) ordered[key] = state_[key];
    settle(group_, local_, ordered.ptr());
    return ordered;
  }

 private:
  std::string format_at(const std::string& name) const {
    return py::cast<std::string>(py::handle(number_of(group_, py::str(name).ptr())));
  }

  void set(const py::handle& key, const at::Tensor& local, const py::object& shape = py::none()) {
    state_[key] = like(local, param_.ptr(), shape);
  }

  void add(const py::handle& key, const py::handle& value) {
    if (state_.contains(key)) return;  // of the clock
    const SavedEntry* const entry = entries_.find(text_of(key));
    if (!is_tensor(value.ptr())) {
      state_[key] = value;
      return;
    }
    const at::Tensor& t = THPVariable_Unpack(value.ptr());
    const at::IntArrayRef own_sizes = THPVariable_Unpack(param_.ptr()).sizes();
    if (!entry && t.sizes() == own_sizes) {
      const at::Tensor part = part_of(value, param_);
      set(key, copy_as(part, part.scalar_type(), local_));
    } else if (!entry || entry->like == Like::number) {
      const at::Tensor whole = whole_of(value);
      state_[key] = wrapped(whole.to(local_.device(), whole.scalar_type(), false, /*copy=*/true));
    } else if (entry->state == "master") {
      masters_[key] = value;
    } else if (entry->like == Like::row) {
      const at::Tensor part = part_of(value, param_);
      const py::tuple shape = py::cast(t.sizes().vec());
      set(key, part.to(local_.device(), at::kFloat, false, /*copy=*/true), shape);
    } else if (entry->like == Like::param) {
      add_state(*entry, value);
    }
  }

  void add_state(const SavedEntry& entry, const py::handle& value) {
    const auto [saved, given] = arrays_of(entry, value);
    const auto [format, arrays] = converted(param_.ptr(), format_named(format_at(entry.state)),
                                            saved, given.first, given.second, seed_, index_);
    const py::object name = entry_name(entry.state, format);
    set(name, arrays.first);
    if (!arrays.second.defined()) return;
    const py::tuple shape = py::cast(scale_shape(param_.ptr()));
    set(py::str(text_of(name) + "_scale"), arrays.second, shape);
  }

  // A saved state's format, and what this process has of it; float32 where it cuts groups.
  std::pair<Format, Arrays> arrays_of(const SavedEntry& entry, const py::handle& value) const {
    if (entry.scale.empty()) {
      const at::Tensor data = part_of(value, param_);
      if (!entry.format.empty()) return {format_named(entry.format), {data, {}}};
      const bool is_double = data.scalar_type() == at::kDouble;  // as torch may have saved it
      return {is_double ? Format::float32 : check_format(data, {"the state"}), {data, {}}};
    }
    const Format format = format_named(entry.format);
    const py::object scale = saved_[py::str(entry.scale)];
    if (!is_dtensor(param_.ptr())) return {format, {whole_of(value), whole_of(scale)}};
    const std::vector<int64_t> shape = scale_shape(param_.ptr());
    const bool fits = has_groups(param_.ptr());
    const auto placed = [&](const py::handle& t) {
      return py::cast<bool>(python_functions().is_placed_as(t, param_));
    };
    if (fits && placed(value) && placed(scale) &&
        THPVariable_Unpack(scale.ptr()).sizes() == at::IntArrayRef(shape))
      return {format, {local_of(value.ptr()), local_of(scale.ptr())}};
    const at::Tensor data = whole_of(value), scales = whole_of(scale);
    if (fits && data.is_contiguous())
      return {format, {part_of_whole(data, param_), part_of_whole(scales.reshape(shape), param_)}};
    return {Format::float32, {part_of_whole(values_of(data, scales, native(format)), param_), {}}};
  }

  // The clock in one piece, as the step keeps it (core/rules/base.h), where the file has all of it.
  void join_clock() {
    py::object keys[3];  // step, beta_powers, the rule's own number
    for (const auto& [key, value] : saved_) {
      const std::string name = text_of(key);
      const SavedEntry* const entry = entries_.find(name);
      if (!entry || entry->like != Like::number) continue;
      const int place = name == "step" ? 0 : name == "beta_powers" ? 1 : 2;
      keys[place] = py::reinterpret_borrow<py::object>(key);
    }
    for (const py::object& key : keys) {
      PyObject* const value = key ? item_of(saved_.ptr(), key.ptr()) : nullptr;
      if (!value || !is_plain(value) || THPVariable_Unpack(value).scalar_type() != at::kDouble)
        return;
    }
    // No autograd graph holds a clock: its views need no version counter in common.
    const at::AutoDispatchBelowADInplaceOrView plain_views;
    const at::Tensor clock = at::empty({4}, local_.options().dtype(at::kDouble));
    const at::Tensor places[] = {clock.select(0, 0), clock.narrow(0, 1, 2), clock.select(0, 3)};
    for (int i = 0; i < 3; ++i) {
      const at::Tensor& value = THPVariable_Unpack(saved_[keys[i]].ptr());
      places[i].copy_(value.detach().view(places[i].sizes()));
      state_[keys[i]] = wrapped(places[i]);
    }
  }

  void add_master(py::list undo) {
    if (!is_low_precision(local_)) return;
    for (const MasterEntry& each : master_entries())
      if (state_.contains(each.entry)) return;
    if (masters_.empty() && old_)  // a file of torch's: the master stays
      for (const MasterEntry& each : master_entries())
        if (PyObject* held = item_of(old_, each.entry.ptr()))
          masters_[each.entry] = py::handle(held);
    if (masters_.empty()) return;
    py::dict found;
    for (const MasterEntry& each : master_entries())
      if (masters_.contains(each.entry))
        found[each.entry] =
            wrapped(copy_as(part_of(masters_[each.entry], param_), each.dtype, local_));
    const std::string format = format_at("master");
    const MasterEntry* const wanted = master_entry(format, local_.scalar_type());
    if (wanted && found.size() == 1 && found.contains(wanted->entry)) {
      set(wanted->entry, THPVariable_Unpack(found[wanted->entry].ptr()));
      return;
    }
    // The parameter changes only where the format of before rounds otherwise.
    const at::Tensor weight = local_.detach();
    const at::Tensor values = master_values(weight, found.ptr());
    undo.append(py::make_tuple(weight, weight.clone()));
    set_master(format, param_.ptr(), state_.ptr(), values);
  }

  const SavedEntries& entries_;
  const py::dict saved_;
  const py::object param_;
  const at::Tensor local_;
  PyObject* group_;
  const uint64_t seed_;
  const int64_t index_;
  PyObject* const old_;  // the state until now; or null
  py::dict state_, masters_;
};

// What each parameter of these param_groups keeps from now on, in new tensors and in the file's
// order; None where the file has nothing of it. wrong_state has nothing against the file's states.
// Each state is stored as its group says; a format that is the file's keeps its bits.
//
// states: those until now, by parameter; a file of torch's leaves them their masters. seed: of
// stochastic rounding, where the file's groups have none. undo: gets (weight, its values) of a
// parameter whose new master rounds otherwise, before it is changed. Parts of DTensors are gathered
// by Python, on all processes in the same order.
py::list restored(const SavedEntries& entries, const py::list& groups, const py::dict& states,
                  const py::dict& state_dict, const py::int_& seed, py::list undo) {
  const at::NoGradGuard no_grad;
  const py::dict found = state_dict["state"];
  const py::list files = state_dict["param_groups"];
  py::list made;
  std::vector<std::optional<Restoring>> all;
  BytesByDevice bytes;
  for (size_t number = 0; number < groups.size(); ++number) {
    const py::dict file = files[number];
    const auto own_seed = py::cast<uint64_t>(file.contains("seed") ? file["seed"] : seed);
    const py::list params = params_of(groups[number].ptr()), numbers = file["params"];
    for (size_t i = 0; i < params.size(); ++i) {
      const py::object param = params[i];
      const py::object saved = found.attr("get")(numbers[i]);
      made.append(saved);
      all.emplace_back();
      if (!py::isinstance<py::dict>(saved) || py::len(saved) == 0) continue;
      all.back().emplace(entries, saved, param, groups[number].ptr(), own_seed,
                         int64_t(all.size()) - 1, item_of(states.ptr(), param.ptr()));
      all.back()->add_bytes(bytes);
    }
  }
  const HostRoom room(bytes);
  for (size_t i = 0; i < all.size(); ++i)
    if (all[i]) made[i] = all[i]->restored(undo);
  return made;
}

}  // namespace

void bind_restore(py::module_& m) {
  m.def("restored", &restored, py::arg("entries"), py::arg("groups"), py::arg("states"),
        py::arg("state_dict"), py::arg("seed"), py::arg("undo"));
}

}  // namespace amp_mp
