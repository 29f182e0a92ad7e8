#include "torch/python/unpack.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "torch/python/objects.h"

namespace amp_mp {

Tensors unpack(const py::sequence& list, const char* argument) {
  Tensors tensors;
  tensors.reserve(list.size());
  for (const py::handle& item : list) {
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

bool same_items(const py::list& lists, const py::list& items) {
  Py_ssize_t at = 0;
  const Py_ssize_t count = PyList_GET_SIZE(items.ptr());
  for (const py::handle given : lists) {
    const py::object list = fast_sequence(given.ptr());
    if (!list)
      throw py::type_error("amp_mp: lists must hold lists or tuples, found " + repr_of(given));
    const Py_ssize_t length = PySequence_Fast_GET_SIZE(list.ptr());
    if (at + length > count) return false;
    for (Py_ssize_t i = 0; i < length; ++i)
      if (PySequence_Fast_GET_ITEM(list.ptr(), i) != PyList_GET_ITEM(items.ptr(), at++))
        return false;
  }
  return at == count;
}

}  // namespace amp_mp
