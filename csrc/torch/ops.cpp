#include "torch/ops.h"

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "cpu/passes.h"
#include "torch/bind.h"
#include "torch/device.h"
#include "torch/python/scalars.h"
#include "torch/python/unpack.h"

namespace amp_mp {

namespace {

// Measures on the device of the tensors, or on `device` if no tensor is defined. label_of: of a
// tensor, for errors.
template <class F>
Measurement measure(const Tensors& tensors, at::Device device, const F& label_of) {
  for (const at::Tensor& t : tensors)
    if (t.defined()) {
      device = t.device();
      break;
    }
  std::vector<Reading> readings(tensors.size());
  Tensors kept;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor* t = &tensors[i];
    if (!t->defined()) continue;
    if (t->_is_zerotensor()) t = &kept.emplace_back(with_memory(*t));
    const Label label = label_of(i);
    check_plain(*t, label);
    check_device(*t, device, label);
    if (!t->is_non_overlapping_and_dense()) t = &kept.emplace_back(t->contiguous());
    readings[i] = {t->numel(), array_of(*t, label)};
  }
  return Measurement(readings, device);
}

}  // namespace

at::Tensor measure(const Tensors& tensors) {
  return measure(tensors, at::kCPU, [](size_t i) { return Label{"tensors", int64_t(i)}; }).rows();
}

Measurement measure(const Slots& slots) {
  return measure(slots.grads(), slots.device(),
                 [&](size_t i) { return Label{"the gradient", int64_t(i), &slots.name(i)}; });
}

at::Tensor combine(const at::Tensor& rows) {
  check_plain(rows, {"rows"});
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.size(1) == 3, "amp_mp: rows (", describe(rows),
                    ") must have shape [n, 3]");
  auto* given = check_doubles<Statistics>(rows, "rows", 0);
  const int64_t count = rows.size(0);
  const at::Device device = rows.device();
  at::Tensor result = at::empty({count + 1, 3}, rows.options());
  auto* out = data_of<Statistics>(result);
  // On CUDA each row is passed as a tensor of one span.
  const auto longs = rows.options().dtype(at::kLong);
  const at::Tensor first = device.is_cuda() ? at::arange(count + 1, longs) : at::Tensor();
  const at::Tensor ticket = device.is_cuda() ? at::zeros({1}, longs) : at::Tensor();
  on(
      device,
      [&] {
        std::copy(given, given + count, out);
        out[count] = amp_mp::combine(given, count);
      },
      AMP_MP_CUDA(combine({given, data_of<int64_t>(first), data_of<unsigned>(ticket), out, count},
                          stream)));
  return result;
}

void copy_(const Tensors& to, const Tensors& from, const std::optional<at::Tensor>& verdict,
           double multiplier, bool saturate) {
  TORCH_CHECK_VALUE(to.size() == from.size(), "amp_mp: `to` has ", to.size(),
                    " tensors, `from` has ", from.size());
  if (to.empty()) return;
  TORCH_CHECK_TYPE(to[0].defined(), "amp_mp: to[0] is None; a tensor is needed");
  const at::Device device = to[0].device();
  std::vector<Transfer> transfers;
  std::vector<std::pair<at::Tensor, Label>> written;
  Tensors kept;
  kept.reserve(2 * to.size());  // references into it stay good
  for (size_t i = 0; i < to.size(); ++i) {
    const Label to_label{"to", int64_t(i)}, from_label{"from", int64_t(i)};
    check_writable(to[i], to_label);
    check_device(to[i], device, to_label);
    const at::Tensor& given = kept.emplace_back(with_memory(from[i]));
    check_plain(given, from_label);
    check_device(given, device, from_label);
    check_same_sizes(given, to[i], from_label, to_label);
    const at::Tensor& source = laid_out_as(to[i], given, kept);
    written.emplace_back(to[i], to_label);
    const bool in_place = to[i].numel() > 0 && source.const_data_ptr() == to[i].const_data_ptr();
    if (!in_place) written.emplace_back(source, from_label);
    TORCH_CHECK_VALUE(!in_place || source.scalar_type() == to[i].scalar_type(),
                      "amp_mp: ", to_label.text(), " and ", from_label.text(),
                      " are the same memory with different dtypes");
    transfers.push_back({to[i].numel(),
                         {to[i].mutable_data_ptr(), check_format(to[i], to_label)},
                         array_of(source, from_label),
                         saturate,
                         {}});
  }
  check_no_overlap(written);
  const Verdict* v = verdict.has_value() ? verdict_of(*verdict, device) : nullptr;
  const auto count = int64_t(transfers.size());
  on(
      device,
      [&] {
        if (v && v->skip != 0) return;
        cpu::copy(transfers.data(), count, v ? v->multiplier : multiplier, at::get_num_threads());
      },
      AMP_MP_CUDA(copy(transfers.data(), count, v, multiplier, stream)));
  for (const at::Tensor& t : to) bump_version(t);
}

// Arguments are unpacked with the GIL held, everything else runs without it.
void bind_ops(py::module_& m) {
  m.def("check_weights", &check_weights, py::arg("weights"), py::arg("names"));
  m.def(
      "measure",
      [](const py::sequence& tensors) {
        const Tensors list = unpack(tensors, "tensors");
        const py::gil_scoped_release release;
        return measure(list);
      },
      py::arg("tensors"));
  m.def(
      "used_on_current_stream",
      [](const py::sequence& tensors) {
        for (const at::Tensor& t : unpack(tensors, "tensors")) used_on_current_stream(t);
      },
      py::arg("tensors"));
  m.def("combine", [](const at::Tensor& rows) { return combine(rows); }, py::arg("rows"));
  m.def(
      "copy_",
      [](const py::sequence& to, const py::sequence& from, const std::optional<at::Tensor>& verdict,
         double multiplier, bool saturate) {
        const Tensors targets = unpack(to, "to"), sources = unpack(from, "from");
        const py::gil_scoped_release release;
        copy_(targets, sources, verdict, multiplier, saturate);
      },
      py::arg("to"), py::arg("from_"), py::kw_only(), py::arg("verdict") = py::none(),
      py::arg("multiplier") = 1.0, py::arg("saturate") = false);
}

}  // namespace amp_mp
