#include "torch/state/saved_state.h"

#include <cmath>
#include <map>
#include <set>

namespace amp_mp {
namespace {

// What a value is, for messages: its class, and the value itself where that is short.
std::string described(const py::handle& value) {
  const std::string text = repr_of(value), kind = Py_TYPE(value.ptr())->tp_name;
  return text.size() < 40 ? kind + " " + text : kind;
}

[[noreturn]] void refuse(const std::string& wrong) {
  throw py::value_error("state_dict: " + wrong + "; nothing was loaded");
}

bool is_sequence(const py::handle& value) {
  return py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value);
}

// A dict's value; null where it has none.
py::handle value_of(const py::handle& dict, const char* key) {
  return PyDict_GetItemString(dict.ptr(), key);
}

void check_group_of_file(const py::handle& file, const py::handle& group, const std::string& name) {
  if (!py::isinstance<py::dict>(file)) refuse(name + " must be a dict, found " + described(file));
  const py::handle numbers = value_of(file, "params");
  if (!numbers) refuse(name + ": 'params' is missing");
  bool are_numbers = is_sequence(numbers);
  if (are_numbers)
    for (const py::handle number : numbers)
      are_numbers = are_numbers && (PyLong_Check(number.ptr()) || PyUnicode_Check(number.ptr()));
  if (!are_numbers)
    refuse(name + ": 'params' must be a list of numbers, found " + described(numbers));
  std::set<std::string> seen;
  for (const py::handle number : numbers)
    if (!seen.insert(repr_of(number)).second)
      refuse(name + ": 'params' has " + repr_of(number) + " twice");
  const size_t count = py::len(numbers), own = py::len(value_of(group, "params"));
  if (count != own)
    refuse(name + " has " + std::to_string(count) + " parameters, the optimizer's has " +
           std::to_string(own));
}

}  // namespace

void check_parts(const py::dict& state_dict, const py::list& groups) {
  std::string lacking;
  for (const char* name : {"state", "param_groups"})
    if (!state_dict.contains(name))
      lacking += (lacking.empty() ? "'" : ", '") + std::string(name) + "'";
  if (!lacking.empty()) refuse("[" + lacking + "] missing");
  const py::object state = state_dict["state"], files = state_dict["param_groups"];
  if (!py::isinstance<py::dict>(state)) refuse("'state' must be a dict, found " + described(state));
  if (!is_sequence(files)) refuse("'param_groups' must be a list, found " + described(files));
  if (py::len(files) != groups.size())
    refuse("there are " + std::to_string(py::len(files)) + " param_groups, and the optimizer has " +
           std::to_string(groups.size()));
  size_t index = 0;
  for (const py::handle file : files) {
    check_group_of_file(file, groups[index], "param_group " + std::to_string(index));
    ++index;
  }
}

py::dict by_names(const py::dict& state_dict, const py::list& groups) {
  const py::object files = state_dict["param_groups"];
  struct Saved {
    size_t group;
    py::object number;
  };
  std::map<std::string, Saved> places;
  std::vector<py::dict> saved;
  for (const py::handle file : files) {
    const py::handle names = value_of(file, "param_names");
    const py::handle numbers = value_of(file, "params");
    if (!names) return state_dict;
    if (!is_sequence(names) || py::len(names) != py::len(numbers))
      refuse("param_group " + std::to_string(saved.size()) +
             ": 'param_names' must be a name for each parameter, found " + described(names));
    auto number = numbers.begin();
    for (const py::handle name : names)
      places[text_of(name)] = {saved.size(), py::reinterpret_borrow<py::object>(*number++)};
    saved.push_back(py::reinterpret_borrow<py::dict>(file));
  }
  py::list ordered;
  for (const py::handle group : groups) {
    const py::handle names = value_of(group, "param_names");
    if (!names) return state_dict;
    py::list numbers;
    size_t home = ordered.size();
    for (const py::handle name : names) {
      const auto found = places.find(text_of(name));
      if (found == places.end())
        refuse("the optimizer's parameter " + repr_of(name) +
               " is not in the file, by param_names");
      if (numbers.empty()) home = found->second.group;
      if (found->second.group != home || py::len(names) != py::len(saved[home]["params"]))
        refuse("the parameters of the group of " + repr_of(name) +
               " are in other param_groups of the file, by param_names");
      numbers.append(found->second.number);
    }
    const py::dict file = saved[home].attr("copy")();
    file["params"] = numbers;
    file["param_names"] = py::list(py::reinterpret_borrow<py::object>(names));
    ordered.append(file);
  }
  const py::dict found = state_dict.attr("copy")();
  found["param_groups"] = ordered;
  return found;
}

std::string wrong_clock(const py::object& value, const std::string& name) {
  const bool is_step = name == "step", is_powers = name == "beta_powers";
  std::vector<double> numbers;
  if (is_tensor(value.ptr())) {
    const at::Tensor here = doubles_on_host(local_of(value.ptr()));
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
    if (is_step && !is_count) return "must be a whole number from 0 on" + found;
    if (is_powers && !(number >= 0 && number <= 1)) return "must be in [0, 1]" + found;
  }
  return "";
}

}  // namespace amp_mp
