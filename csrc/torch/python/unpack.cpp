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
      tensors.push_back(tensor_of(item));
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

}  // namespace amp_mp
