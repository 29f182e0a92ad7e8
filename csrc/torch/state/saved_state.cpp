// Whether a parameter's saved state can be loaded: the checks of optim/state/check_loadable.py.
#include "torch/state/saved_state.h"

#include <cmath>

#include "torch/state/live_state.h"

namespace amp_mp {

using Holds = SavedEntry::Holds;

namespace {

// Describes a value for messages: its class, and the value itself if that is short.
std::string described(const py::handle& value) {
  const std::string text = repr_of(value), kind = Py_TYPE(value.ptr())->tp_name;
  return text.size() < 40 ? kind + " " + text : kind;
}

// What is wrong with a tensor's memory: it has none, or another process's.
std::string wrong_memory(const py::handle& value) {
  if (!is_plain(value)) {
    const std::string foreign = package().why_foreign(value);
    if (!foreign.empty()) return foreign;
  }
  const at::Tensor local = local_of(value);
  if (local.is_meta()) return "is on the meta device, without memory to copy; save its numbers";
  if (local.layout() != at::kStrided)
    return "has layout " + text_of(wrapped(local).attr("layout")) + "; save it as a dense tensor";
  return local._is_zerotensor() ? "has no memory to copy; save it as a dense tensor" : "";
}

std::string wrong_shape(const at::Tensor& t, const py::handle& param, bool in_bytes,
                        bool of_rows = false) {
  const at::Tensor& own = tensor_of(param);
  if (!in_bytes && has_shape_of(t.sizes(), own.sizes(), of_rows)) return "";
  std::vector<int64_t> wanted = own.sizes().vec();
  if (in_bytes) wanted.push_back(2);
  if (t.sizes() == at::IntArrayRef(wanted)) return "";
  std::string wrong = "has shape " + shape_text(t.sizes()) + ", but " +
                      (in_bytes ? "its bytes have shape " : "the parameter has shape ") +
                      shape_text(wanted);
  if (is_dtensor(param) && t.dim() >= own.dim() &&
      t.sizes().slice(0, size_t(own.dim())) == local_of(param).sizes())
    wrong += ": it is one process's part as a plain tensor; load DTensors or whole tensors";
  return wrong;
}

// What is wrong with a tensor of a saved state; empty if it can be loaded. entry: null if the
// optimizer's rules have no such entry.
std::string wrong_tensor(const SavedEntries& entries, const SavedEntry* entry,
                         const std::string& name, const py::handle& value,
                         const py::handle& param) {
  const std::string memory = wrong_memory(value);
  if (!memory.empty()) return memory;
  const at::Tensor& t = tensor_of(value);
  if (!entry) {
    const std::string refused = entries.refusal(name);
    return refused.empty() ? wrong_shape(t, param, false) : refused;
  }
  const auto dtype = [&] { return text_of(value.attr("dtype")); };
  if (entry->is_of_clock()) {
    if (t.numel() == 1 && !t.is_complex()) return "";
    return "has shape " + shape_text(t.sizes()) + " and dtype " + dtype() + ", must be one number";
  }
  const bool in_groups = entry->group > 1 || !entry->scale.empty();
  // The elements of a group are neighbours in memory.
  if (in_groups && !local_of(value).is_non_overlapping_and_dense())
    return "is not dense in memory, as expand() and slices make tensors; save its contiguous()";
  const at::ScalarType kind = t.scalar_type();
  const auto shown = [&] { return text_of(py::cast(*entry->shown)); };
  const bool is_shown = entry->shown.value_or(kind) == kind;
  if (entry->group > 1) {
    const int64_t count = tensor_of(param).numel() / entry->group;
    if (is_shown && t.numel() == count) return "";
    return "has " + std::to_string(t.numel()) + " elements of " + dtype() + ", must have " +
           std::to_string(count) + " of " + shown();
  }
  if (!entry->shown && kind != at::kFloat && kind != at::kBFloat16 && kind != at::kHalf &&
      kind != at::kDouble)
    return "has dtype " + dtype() + ", must be floating-point";
  if (!is_shown)
    return "has dtype " + dtype() + ", but '" + entry->format + "' is stored as " + shown();
  return wrong_shape(t, param, entry->in_bytes, entry->holds == Holds::rows);
}

// The states and numbers that every parameter has after a step.
std::set<std::string> needed_under(const RuleLayout& rule) {
  std::set<std::string> needed;
  if (!rule.own_is_late) needed.insert(text_of(rule.own));
  for (const KeptState& kept : rule.states)
    if (!kept.late) needed.insert(text_of(kept.name));
  return needed;
}

// As wrong_state, for one parameter. needed: what every parameter has after a step.
py::object wrong_state_of(const SavedEntries& entries, const std::set<std::string>& needed,
                          const py::handle& given, const py::handle& param) {
  const auto wrong = [](const std::string& entry, const std::string& what) {
    return py::make_tuple(entry, what);
  };
  if (!py::isinstance<py::dict>(given))
    return wrong("state", std::string("must be a dict, found ") + Py_TYPE(given.ptr())->tp_name);
  const auto state = py::reinterpret_borrow<py::dict>(given);
  std::map<std::string, std::string> held;  // the entry of each state's data
  std::string strange;
  for (const auto& [key, value] : state) {
    if (value.is_none()) continue;
    const std::string name = text_of(key);
    const SavedEntry* entry = entries.find(name);
    if (entry && entry->holds == Holds::unused) continue;
    const bool is_number = entry && entry->is_of_clock(), tensor = is_tensor(value);
    std::string what;
    if (tensor)
      what = wrong_tensor(entries, entry, name, value, param);
    else if (entry && !is_number)
      what = "is not a tensor: " + repr_of(value);
    if (what.empty() && is_number)
      what = wrong_clock(py::reinterpret_borrow<py::object>(value), name);
    if (!what.empty()) return wrong(name, what);
    if (!entry && tensor && strange.empty()) strange = name;
    if (!entry || (entry->holds != Holds::state && entry->holds != Holds::master)) continue;
    const auto [known, is_new] = held.emplace(entry->state, name);
    if (!is_new) {
      const bool later = known->second.size() <= name.size();
      return wrong(later ? known->second : name,
                   "is there as '" + (later ? name : known->second) + "', too");
    }
    if (!entry->scale.empty() && !item_of(state, py::str(entry->scale)))
      return wrong(name, "is stored as '" + entry->format + "', but has no '" + entry->scale + "'");
  }
  const bool keeps = held.size() > held.count("master");
  if (!strange.empty() && !keeps)
    return wrong(strange,
                 "is there, and nothing that the optimizer keeps: another optimizer saved it");
  const py::handle step = item_of(state, py::str("step"));
  for (const std::string& name : needed) {
    const auto found = held.find(name);
    if (found != held.end() && !step && name != "momentum_buffer")  // torch's Muon has no count
      return wrong("step",
                   "is missing, though there is '" + found->second + "'; save the count with it");
  }
  for (const std::string& name : needed)
    if (!held.count(name) && !item_of(state, py::str(name)) && step &&
        (is_tensor(step) ? doubles_on_host(local_of(step)).item<double>() : number_in(step)) > 0)
      return wrong(name, "is missing, though it has taken steps");
  return py::none();
}

}  // namespace

std::string wrong_clock(const py::object& value, const std::string& name) {
  std::vector<double> numbers;
  if (is_tensor(value)) {
    const at::Tensor here = doubles_on_host(local_of(value));
    numbers.assign(here.const_data_ptr<double>(), here.const_data_ptr<double>() + here.numel());
  } else {
    numbers = {PyFloat_AsDouble(value.ptr())};
    const bool failed = PyErr_Occurred() != nullptr;
    PyErr_Clear();
    if (failed || PyBool_Check(value.ptr())) return "must be a number, found " + described(value);
  }
  for (const double number : numbers) {
    const bool is_count = number >= 0 && std::isfinite(number) && number == std::floor(number);
    const std::string found = ", found " + repr_of(py::float_(number));
    if (name == "step" && !is_count) return "must be a whole number from 0 on" + found;
  }
  return "";
}

py::object wrong_state(const SavedEntries& entries, const RuleLayout& rule, const py::list& states,
                       const py::list& params) {
  const std::set<std::string> needed = needed_under(rule);
  for (size_t i = 0; i < states.size(); ++i) {
    if (states[i].is_none()) continue;
    const py::object wrong = wrong_state_of(entries, needed, states[i], params[i]);
    if (!wrong.is_none()) return py::make_tuple(i, wrong);
  }
  return py::none();
}

}  // namespace amp_mp
