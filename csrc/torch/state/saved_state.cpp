// Whether a parameter's saved state can be loaded: the checks of optim/state/check_loadable.py.
#include <map>

#include "torch/state/saved_state.h"

namespace amp_mp {
namespace {

std::string text_at(const py::handle& entry, const char* name) {
  return py::cast<std::string>(entry.attr(name));
}

// What has no memory, or another process's.
std::string wrong_memory(const py::handle& value) {
  if (!is_plain(value.ptr())) {
    static const py::object& why_foreign =
        *new py::object(py::module_::import("amp_mp.sharding.shards").attr("why_foreign"));
    if (const std::string wrong = text_of(why_foreign(value)); !wrong.empty()) return wrong;
  }
  const at::Tensor local = local_of(value.ptr());
  if (local.is_meta()) return "is on the meta device, without memory to copy; save its numbers";
  if (local.layout() != at::kStrided)
    return "has layout " + text_of(wrapped(local).attr("layout")) + "; save it as a dense tensor";
  return local._is_zerotensor() ? "has no memory to copy; save it as a dense tensor" : "";
}

std::string wrong_shape(const at::Tensor& t, const py::handle& param, bool in_bytes,
                        bool of_rows = false) {
  const at::Tensor& own = THPVariable_Unpack(param.ptr());
  if (of_rows && has_shape_of(t.sizes(), own.sizes(), true)) return "";
  std::vector<int64_t> wanted = own.sizes().vec();
  if (in_bytes) wanted.push_back(2);
  if (t.sizes() == at::IntArrayRef(wanted)) return "";
  std::string wrong = "has shape " + shape_text(t.sizes()) + ", but " +
                      (in_bytes ? "its bytes have shape " : "the parameter has shape ") +
                      shape_text(wanted);
  if (is_dtensor(param.ptr()) && t.dim() >= own.dim() &&
      t.sizes().slice(0, size_t(own.dim())) == local_of(param.ptr()).sizes())
    wrong += ": it is one process's part as a plain tensor; load DTensors or whole tensors";
  return wrong;
}

// What is wrong with a tensor of a saved state; empty where it can be loaded. entry: None where the
// optimizer's rules have no such entry. refused: formats that their state cannot have.
std::string wrong_tensor(const py::handle& entry, const py::handle& name, const py::handle& value,
                         const py::handle& param, const py::dict& refused) {
  const std::string memory = wrong_memory(value);
  if (!memory.empty()) return memory;
  const at::Tensor& t = THPVariable_Unpack(value.ptr());
  if (entry.is_none()) {
    if (refused.contains(name)) return text_of(refused[name]);
    return wrong_shape(t, param, false);
  }
  const std::string like = text_at(entry, "like"), dtype = text_of(value.attr("dtype"));
  if (like == "number") {
    const bool two = text_of(name) == "beta_powers";
    const bool fits = two ? t.dim() == 1 && t.numel() == 2 : t.numel() == 1;
    if (fits && !t.is_complex()) return "";
    return "has shape " + shape_text(t.sizes()) + " and dtype " + dtype + ", must be " +
           (two ? "two numbers" : "one number");
  }
  const py::object shown = entry.attr("shown");
  const bool is_shown = shown.is_none() || py::object(value.attr("dtype")).is(shown);
  if (like == "scale") {
    const int64_t count = THPVariable_Unpack(param.ptr()).numel() / kGroup;
    if (is_shown && t.numel() == count) return "";
    return "has " + std::to_string(t.numel()) + " elements of " + dtype + ", must have " +
           std::to_string(count) + " of " + text_of(shown);
  }
  const auto kind = t.scalar_type();
  if (shown.is_none() && kind != at::kFloat && kind != at::kBFloat16 && kind != at::kHalf &&
      kind != at::kDouble)
    return "has dtype " + dtype + ", must be floating-point";
  if (!is_shown)
    return "has dtype " + dtype + ", but " + repr_of(entry.attr("format")) + " is stored as " +
           text_of(shown);
  return wrong_shape(t, param, py::cast<bool>(entry.attr("in_bytes")), like == "row");
}

}  // namespace

py::object wrong_state(const py::object& schema, const py::tuple& needed, const py::object& given,
                       const py::object& param) {
  const auto wrong = [](const py::handle& entry, const std::string& what) {
    return py::make_tuple(entry, what);
  };
  if (!py::isinstance<py::dict>(given))
    return wrong(py::str("state"),
                 std::string("must be a dict, found ") + Py_TYPE(given.ptr())->tp_name);
  const auto state = py::reinterpret_borrow<py::dict>(given);
  const py::dict entries = schema.attr("entries"), refused = schema.attr("refused");
  std::map<std::string, std::string> held;  // the entry of each state's data
  py::object strange = py::none();
  for (const auto& [name, value] : state) {
    const py::object entry = entries.attr("get")(name);
    if (value.is_none()) continue;
    const std::string like = entry.is_none() ? "" : text_at(entry, "like");
    const bool tensor = is_tensor(value.ptr());
    std::string what;
    if (tensor)
      what = wrong_tensor(entry, name, value, param, refused);
    else if (!entry.is_none() && (like != "number" || text_of(name) == "beta_powers"))
      what = "is not a tensor: " + repr_of(value);
    if (what.empty() && like == "number")
      what = wrong_clock(py::reinterpret_borrow<py::object>(value), text_of(name));
    if (!what.empty()) return wrong(name, what);
    if (entry.is_none() && tensor && strange.is_none())
      strange = py::reinterpret_borrow<py::object>(name);
    if (like != "param") continue;
    const std::string of = text_at(entry, "state"), own = text_of(name);
    const auto [known, is_new] = held.emplace(of, own);
    if (!is_new) {
      const bool later = known->second.size() <= own.size();
      return wrong(py::str(later ? known->second : own),
                   "is there as '" + (later ? own : known->second) + "', too");
    }
    const py::object scale = entry.attr("scale");
    if (py::len(scale) > 0 && !item_of(state.ptr(), scale.ptr()))
      return wrong(
          name, "is stored as " + repr_of(entry.attr("format")) + ", but has no " + repr_of(scale));
  }
  const bool keeps = held.size() > held.count("master");
  if (!strange.is_none() && !keeps)
    return wrong(strange,
                 "is there, and nothing that the optimizer keeps: another optimizer saved it");
  PyObject* step = item_of(state.ptr(), py::str("step").ptr());
  for (const py::handle& name : needed) {
    const auto found = held.find(text_of(name));
    if (found != held.end() && !step)
      return wrong(py::str("step"),
                   "is missing, though there is '" + found->second + "'; save the count with it");
  }
  for (const py::handle& name : needed)
    if (!held.count(text_of(name)) && !item_of(state.ptr(), name.ptr()) && step &&
        (is_tensor(step) ? doubles_on_host(local_of(step)).item<double>() : number_in(step)) > 0)
      return wrong(name, "is missing, though it has taken steps");
  return py::none();
}

}  // namespace amp_mp
