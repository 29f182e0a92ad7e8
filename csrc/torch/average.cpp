// The averaging pass on lists of tensors.
#include <ATen/Parallel.h>

#include "cpu/passes.h"
#include "torch/bind.h"
#include "torch/device.h"
#include "torch/ops.h"
#include "torch/python/unpack.h"
#include "torch/weights/master_tensors.h"

namespace amp_mp {
namespace {

// Numbers in one tensor, or in two: a weight and its master.
Array stored(const at::Tensor& data, const at::Tensor& master, const Label& label,
             const Label& master_label) {
  const Array alone = array_of(data, label);
  if (!master.defined()) return alone;
  const std::optional<ArrayTensors> both = master_in(data, master);
  TORCH_CHECK_TYPE(both, "amp_mp: ", master_label.text(), " (", describe(master),
                   ") does not go with ", label.text(), " (", describe(data), ")");
  return {const_cast<void*>(both->data.const_data_ptr()), both->format,
          const_cast<void*>(both->second.const_data_ptr())};
}

}  // namespace

void average_(const Tensors& to, const Tensors& to_masters, const Tensors& from,
              const Tensors& from_masters, double decay) {
  const size_t count = to.size();
  for (const Tensors* list : {&to_masters, &from, &from_masters})
    TORCH_CHECK_VALUE(list->size() == count, "amp_mp: `to` has ", count,
                      " tensors, another list has ", list->size());
  TORCH_CHECK_VALUE(decay >= 0 && decay <= 1, "amp_mp: decay must be in [0, 1], found ", decay);
  if (count == 0) return;
  TORCH_CHECK_TYPE(to[0].defined(), "amp_mp: to[0] is None; a tensor is needed");
  const at::Device device = to[0].device();
  std::vector<Transfer> transfers;
  std::vector<std::pair<at::Tensor, Label>> written;
  Tensors kept;
  kept.reserve(2 * count);  // references into it stay good
  for (size_t i = 0; i < count; ++i) {
    const auto index = int64_t(i);
    const Label to_label{"to", index}, to_master_label{"to_masters", index}, label{"from", index},
        master_label{"from_masters", index};
    const auto check_written = [&](const at::Tensor& t, const Label& own) {
      check_writable(t, own);
      check_device(t, device, own);
      t.mutable_data_ptr();  // a lazy copy becomes a real one
      written.emplace_back(t, own);
    };
    check_written(to[i], to_label);
    if (to_masters[i].defined()) {
      check_same_layout(to_masters[i], to[i], to_master_label, to_label);
      check_written(to_masters[i], to_master_label);
    }
    check_plain(from[i], label);
    check_same_sizes(from[i], to[i], label, to_label);
    at::Tensor master = from_masters[i];
    if (master.defined()) {
      check_plain(master, master_label);
      TORCH_CHECK_VALUE(is_of_size(master, from[i]), "amp_mp: ", master_label.text(), " has shape ",
                        master.sizes(), ", but ", label.text(), " has shape ", from[i].sizes());
      if (is_packed(master) && !same_layout(to[i], from[i]))
        master = unpacked(master.contiguous(), from[i].sizes());
      if (!is_packed(master)) master = laid_out_as(to[i], master, kept);
    }
    transfers.push_back({to[i].numel(),
                         stored(to[i], to_masters[i], to_label, to_master_label),
                         stored(laid_out_as(to[i], from[i], kept), master, label, master_label),
                         true,
                         {}});
  }
  check_no_overlap(written);
  const auto n = int64_t(count);
  on(
      device, [&] { cpu::average(transfers.data(), n, decay, at::get_num_threads()); },
      AMP_MP_CUDA(average(transfers.data(), n, decay, stream)));
  for (const auto& [tensor, label] : written) bump_version(tensor);
}

void bind_average(py::module_& m) {
  m.def(
      "average_",
      [](const py::sequence& to, const py::sequence& to_masters, const py::sequence& from,
         const py::sequence& from_masters, double decay) {
        const Tensors own = unpack(to, "to"), own_masters = unpack(to_masters, "to_masters"),
                      given = unpack(from, "from"),
                      given_masters = unpack(from_masters, "from_masters");
        const py::gil_scoped_release release;
        average_(own, own_masters, given, given_masters, decay);
      },
      py::arg("to"), py::arg("to_masters"), py::arg("from_"), py::arg("from_masters"),
      py::arg("decay"));
}

}  // namespace amp_mp
