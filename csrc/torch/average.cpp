// The averaging pass on lists of tensors.
#include <ATen/Parallel.h>

#include "cpu/passes.h"
#include "torch/bind.h"
#include "torch/device.h"
#include "torch/ops.h"
#include "torch/python/unpack.h"

namespace amp_mp {
namespace {

// Numbers in one tensor, or in two: a weight and the second tensor of its master.
Array stored(const at::Tensor& data, const at::Tensor& rest, const Label& label,
             const Label& rest_label) {
  const Array alone = array_of(data, label);
  if (!rest.defined()) return alone;
  const std::optional<ArrayTensors> master = master_in(data, rest);
  TORCH_CHECK_TYPE(master, "amp_mp: ", rest_label.text(), " (", describe(rest),
                   ") does not go with ", label.text(), " (", describe(data), ")");
  return {const_cast<void*>(master->data.const_data_ptr()), master->format,
          const_cast<void*>(master->rest.const_data_ptr())};
}

}  // namespace

void average_(const Tensors& to, const Tensors& to_rests, const Tensors& from,
              const Tensors& from_rests, double decay) {
  const size_t count = to.size();
  for (const Tensors* list : {&to_rests, &from, &from_rests})
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
    const Label to_label{"to", index}, to_rest_label{"to_rests", index}, label{"from", index},
        rest_label{"from_rests", index};
    const auto check_written = [&](const at::Tensor& t, const Label& own) {
      check_writable(t, own);
      check_device(t, device, own);
      t.mutable_data_ptr();  // a lazy copy becomes a real one
      written.emplace_back(t, own);
    };
    check_written(to[i], to_label);
    if (to_rests[i].defined()) {
      check_same_layout(to_rests[i], to[i], to_rest_label, to_label);
      check_written(to_rests[i], to_rest_label);
    }
    check_plain(from[i], label);
    check_same_sizes(from[i], to[i], label, to_label);
    at::Tensor rest = from_rests[i];
    if (rest.defined()) {
      check_plain(rest, rest_label);
      check_same_sizes(rest, from[i], rest_label, label);
      rest = laid_out_as(to[i], rest, kept);
    }
    transfers.push_back({to[i].numel(),
                         stored(to[i], to_rests[i], to_label, to_rest_label),
                         stored(laid_out_as(to[i], from[i], kept), rest, label, rest_label),
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
      [](const py::sequence& to, const py::sequence& to_rests, const py::sequence& from,
         const py::sequence& from_rests, double decay) {
        const Tensors own = unpack(to, "to"), own_rests = unpack(to_rests, "to_rests"),
                      given = unpack(from, "from"), given_rests = unpack(from_rests, "from_rests");
        const py::gil_scoped_release release;
        average_(own, own_rests, given, given_rests, decay);
      },
      py::arg("to"), py::arg("to_rests"), py::arg("from_"), py::arg("from_rests"),
      py::arg("decay"));
}

}  // namespace amp_mp
