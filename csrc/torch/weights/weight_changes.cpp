#include "torch/weights/weight_changes.h"

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>

#include "cpu/passes.h"
#include "torch/bind.h"
#include "torch/device.h"
#include "torch/python/objects.h"
#include "torch/weights/weight.h"

namespace amp_mp {
namespace {

constexpr int64_t kBitsOfWord = 64;

Format format_of_numbers(at::ScalarType dtype) {
  TORCH_CHECK_VALUE(dtype == at::kHalf || dtype == at::kBFloat16,
                    "amp_mp: weights are compared as float16 or bfloat16, found ", dtype);
  return dtype == at::kHalf ? Format::float16 : Format::bfloat16;
}

uint64_t watched = 0;

}  // namespace

WeightChanges::WeightChanges(py::handle param, at::ScalarType dtype)
    : dtype_(dtype), weight_dtype_(local_of(param).scalar_type()), size_(local_of(param).numel()) {
  memory_ =
      at::zeros({1 + ceil_divide(size_, kBitsOfWord)}, local_of(param).options().dtype(at::kLong));
}

bool WeightChanges::follow(const at::Tensor& weight) {
  if (weight.scalar_type() != weight_dtype_ || weight.numel() != size_) return false;
  if (!weight.is_cpu() && !weight.is_cuda()) return false;
  // Copying to the host waits for the device. So a weight that was copied there before, without
  // waiting, is all there when this returns.
  if (weight.device() != memory_.device()) memory_ = memory_.to(weight.device());
  return true;
}

Changes WeightChanges::changes() const {
  return {data_of<uint64_t>(memory_), format_of_numbers(dtype_)};
}

void watch(py::handle param, py::handle owner, const std::shared_ptr<WeightChanges>& changes) {
  std::weak_ptr<WeightChanges>& present = place_of_changes(param, owner);
  TORCH_CHECK_VALUE(present.expired() || present.lock() == changes,
                    "amp_mp: the changes of this weight are noted for another amp.Changes; take "
                    "them from that one, or delete it first");
  present = changes;
  ++watched;
}

uint64_t watched_so_far() { return watched; }

void compare(const Tensors& after, const std::vector<std::optional<at::Tensor>>& before,
             const Tensors& memory, const std::vector<at::ScalarType>& dtypes) {
  std::vector<Comparison> comparisons;
  for (size_t i = 0; i < after.size(); ++i) {
    const auto index = int64_t(i);
    const Label label{"after", index}, memory_label{"memory", index};
    Comparison& c = comparisons.emplace_back();
    c.size = after[i].numel();
    c.after = array_of(after[i], label);
    if (before.at(i)) {
      check_same_layout(*before[i], after[i], {"before", index}, label);
      check_dtype(*before[i], after[i].scalar_type(), {"before", index});
      c.before = array_of(*before[i], {"before", index});
    }
    const at::Tensor& to = memory.at(i);
    check_dtype(to, at::kLong, memory_label);
    check_device(to, after[0].device(), memory_label);
    check_device(after[i], after[0].device(), label);
    const int64_t words = before[i] ? ceil_divide(c.size, kBitsOfWord) : 0;
    TORCH_CHECK_VALUE(to.is_contiguous() && to.numel() > words, "amp_mp: ", memory_label.text(),
                      " (", describe(to), ") must be ", words + 1, " numbers side by side");
    c.changes = {data_of<uint64_t>(to), format_of_numbers(dtypes.at(i))};
  }
  if (comparisons.empty()) return;
  const auto count = int64_t(comparisons.size());
  on(
      after[0].device(), [&] { cpu::compare(comparisons.data(), count, at::get_num_threads()); },
      AMP_MP_CUDA(compare(comparisons.data(), count, stream)));
}

void bind_weight_changes(py::module_& m) {
  py::class_<WeightChanges, std::shared_ptr<WeightChanges>>(m, "WeightChanges")
      .def(py::init<py::handle, at::ScalarType>(), py::arg("param"), py::arg("dtype"))
      .def(
          "follow", [](WeightChanges& c, py::handle param) { return c.follow(local_of(param)); },
          py::arg("param"))
      .def_property_readonly("memory", &WeightChanges::memory)
      .def_property_readonly("dtype", &WeightChanges::dtype);
  m.def("watch", &watch, py::arg("param"), py::arg("owner"), py::arg("changes"));
  m.def("changes_of", &changes_of, py::arg("param"));
  m.def(
      "watched",
      [](const py::iterable& params) {
        std::vector<std::pair<py::object, std::shared_ptr<WeightChanges>>> found;
        if (watched == 0) return found;
        for (const py::handle param : params)
          if (auto changes = changes_of(param); changes && changes->follow(local_of(param)))
            found.emplace_back(py::reinterpret_borrow<py::object>(param), std::move(changes));
        return found;
      },
      py::arg("params"));
  m.def("compare", &compare, py::arg("after"), py::arg("before"), py::arg("memory"),
        py::arg("dtypes"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace amp_mp
