#include "torch/arguments.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

namespace amp_mp {

Tensors unpack(const py::sequence& list, const char* argument) {
  Tensors tensors;
  tensors.reserve(list.size());
  for (const py::handle item : list) {
    if (item.is_none()) {
      tensors.emplace_back();
    } else if (THPVariable_Check(item.ptr())) {
      tensors.push_back(THPVariable_Unpack(item.ptr()));
    } else {
      throw py::type_error(std::string("amp_mp: ") + argument + " holds a " +
                           std::string(py::str(py::type::of(item))) +
                           "; a tensor or None is needed");
    }
  }
  return tensors;
}

Format format_named(const std::string& name) {
  const auto* found = std::find(std::begin(kFormatNames), std::end(kFormatNames), name);
  if (found == std::end(kFormatNames))
    throw py::value_error("amp_mp: \"" + name + "\" is not a format");
  return Format(found - kFormatNames);
}

void check_weights(const py::sequence& weights, const std::vector<std::string>& names) {
  const Tensors list = unpack(weights, "weights");
  TORCH_CHECK_VALUE(list.size() == names.size(), "amp_mp: there are ", list.size(),
                    " weights, but ", names.size(), " names");
  std::vector<std::pair<at::Tensor, Label>> written;
  for (size_t i = 0; i < list.size(); ++i) {
    const Label label{"the weight", int64_t(i), &names[i]};
    check_writable(list[i], label);
    written.emplace_back(list[i], label);
  }
  check_no_overlap(written);
}

Slots make_slots(const py::sequence& params, const py::sequence& masters,
                 const py::sequence& states, const py::sequence& scales,
                 const std::vector<std::vector<std::string>>& formats, std::vector<bool> stochastic,
                 const py::sequence& clocks, std::vector<int64_t> groups,
                 std::vector<int64_t> tensor_indices, std::vector<int64_t> firsts,
                 std::vector<std::string> names, const std::optional<py::sequence>& dtensors,
                 std::optional<std::vector<int64_t>> row_lengths,
                 std::optional<std::vector<int64_t>> row_strides,
                 const std::optional<at::Device>& device) {
  Slots::Lists lists;
  lists.params = unpack(params, "params");
  lists.masters = unpack(masters, "masters");
  for (const py::handle s : states)
    lists.states.push_back(unpack(py::cast<py::sequence>(s), "states"));
  for (const py::handle s : scales)
    lists.scales.push_back(unpack(py::cast<py::sequence>(s), "scales"));
  for (const std::vector<std::string>& column : formats) {
    std::vector<Format>& tags = lists.formats.emplace_back();
    for (const std::string& name : column) tags.push_back(format_named(name));
  }
  lists.stochastic = std::move(stochastic);
  lists.clocks = unpack(clocks, "clocks");
  lists.groups = std::move(groups);
  lists.tensor_indices = std::move(tensor_indices);
  const std::vector<int64_t> zeros(firsts.size());
  lists.row_lengths = std::move(row_lengths).value_or(zeros);
  lists.row_strides = std::move(row_strides).value_or(zeros);
  lists.device = device;
  lists.firsts = std::move(firsts);
  lists.dtensors = dtensors ? unpack(*dtensors, "dtensors") : Tensors(lists.params.size());
  lists.names = std::move(names);
  return Slots(std::move(lists));
}

// By name, so that a rule's new number is a line in core/rules/base.h and one here.
HyperTensors make_hyper(const py::kwargs& hyper) {
  HyperTensors result = {};
  Hyper& h = result.hyper;
  const std::pair<const char*, double*> doubles[] = {
      {"lr", &h.lr},
      {"beta1", &h.beta1},
      {"beta2", &h.beta2},
      {"eps", &h.eps},
      {"weight_decay", &h.weight_decay},
      {"momentum", &h.momentum},
      {"dampening", &h.dampening},
      {"lr_decay", &h.lr_decay},
      {"trust", &h.trust},
  };
  const std::pair<const char*, bool*> flags[] = {{"nesterov", &h.nesterov},
                                                 {"maximize", &h.maximize},
                                                 {"clip", &h.clip},
                                                 {"always_adapt", &h.always_adapt},
                                                 {"decoupled", &h.decoupled}};
  for (const auto& [key, value] : hyper) {
    const auto name = py::cast<std::string>(key);
    if (name == "lr" && THPVariable_Check(value.ptr())) {
      result.lr = THPVariable_Unpack(value.ptr());
      continue;
    }
    bool known = name == "seed";
    if (known) h.seed = py::cast<uint64_t>(value);
    for (const auto& [own, number] : doubles)
      if (name == own) {
        *number = py::cast<double>(value);
        known = true;
      }
    for (const auto& [own, flag] : flags)
      if (name == own) {
        *flag = py::cast<bool>(value);
        known = true;
      }
    if (!known) throw py::type_error("amp_mp: Hyper has no number \"" + name + "\"");
  }
  return result;
}

// Raw calls, since it runs at every step; and the dicts, which have left the cache since the last
// one, are asked for ahead.
bool holds(const py::list& dicts, const py::tuple& keys, const py::list& values) {
  const auto count = PyList_GET_SIZE(dicts.ptr());
  for (Py_ssize_t i = 0; i < count; ++i) __builtin_prefetch(PyList_GET_ITEM(dicts.ptr(), i));
  for (Py_ssize_t i = 0; i < count; ++i) {
    const char* keys = reinterpret_cast<char*>(
        reinterpret_cast<PyDictObject*>(PyList_GET_ITEM(dicts.ptr(), i))->ma_keys);
    for (int line = 0; line < 4; ++line) __builtin_prefetch(keys + 64 * line);
  }
  for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(keys.ptr()); ++k) {
    PyObject* key = PyTuple_GET_ITEM(keys.ptr(), k);
    const py::list column = values[size_t(k)];
    if (PyList_GET_SIZE(column.ptr()) != count) return false;
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* found = PyDict_GetItemWithError(PyList_GET_ITEM(dicts.ptr(), i), key);
      if (!found && PyErr_Occurred()) throw py::error_already_set();
      if ((found ? found : Py_None) != PyList_GET_ITEM(column.ptr(), i)) return false;
    }
  }
  return true;
}

bool same_items(const py::list& lists, const py::list& items) {
  Py_ssize_t at = 0;
  const Py_ssize_t count = PyList_GET_SIZE(items.ptr());
  for (const py::handle list : lists) {
    const Py_ssize_t length = PyList_GET_SIZE(list.ptr());
    if (at + length > count) return false;
    for (Py_ssize_t i = 0; i < length; ++i)
      if (PyList_GET_ITEM(list.ptr(), i) != PyList_GET_ITEM(items.ptr(), at++)) return false;
  }
  return at == count;
}

bool same_values(const py::dict& dict, const py::list& items) {
  const Py_ssize_t count = PyList_GET_SIZE(items.ptr());
  if (PyDict_GET_SIZE(dict.ptr()) != count) return false;
  PyObject *key, *value;
  for (Py_ssize_t position = 0, at = 0; PyDict_Next(dict.ptr(), &position, &key, &value); ++at)
    if (value != PyList_GET_ITEM(items.ptr(), at)) return false;
  return true;
}

}  // namespace amp_mp
