#include "torch/weights/weight_changes.h"

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <bit>

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
  const at::Tensor weight = local_of(param).detach();
  memory_ = at::zeros({1 + ceil_divide(size_, kBitsOfWord)}, weight.options().dtype(at::kLong));
  compare({weight}, {std::nullopt}, {memory_}, {dtype});
}

bool WeightChanges::fits(const at::Tensor& weight) const {
  return weight.scalar_type() == weight_dtype_ && weight.numel() == size_ &&
         weight.device() == memory_.device();
}

Changes WeightChanges::changes() const {
  return {data_of<uint64_t>(memory_), format_of_numbers(dtype_)};
}

at::Tensor WeightChanges::places() const {
  const at::Tensor words = memory_.narrow(0, 1, memory_.numel() - 1);
  if (!memory_.is_cpu()) {
    constexpr int64_t kTogether = 1 << 22;  // bytes; computing takes 80 times as much
    const at::Tensor bytes = words.view(at::kByte), bit_of = at::arange(8, bytes.options());
    Tensors found;
    for (int64_t at = 0; at < bytes.numel(); at += kTogether) {
      const at::Tensor part = bytes.narrow(0, at, std::min(kTogether, bytes.numel() - at));
      const at::Tensor set = part.nonzero().flatten();  // in few steps of training most are 0
      const at::Tensor eight = part.index_select(0, set).unsqueeze(1);
      const auto where = eight.bitwise_right_shift(bit_of).bitwise_and_(1).nonzero().unbind(1);
      found.push_back(set.index_select(0, where[0]).add_(at).mul_(8).add_(where[1]));
    }
    return found.empty() ? at::empty({0}, words.options()) : at::cat(found);
  }
  const auto* word = words.const_data_ptr<int64_t>();
  const int64_t count = words.numel();
  constexpr int64_t kGrain = 4096;  // words of a thread's share
  const int64_t shares = ceil_divide(count, kGrain);
  std::vector<int64_t> begin(size_t(shares + 1), 0);
  const auto end_of = [&](int64_t s) { return std::min((s + 1) * kGrain, count); };
  at::parallel_for(0, shares, 1, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s)
      for (int64_t w = s * kGrain; w < end_of(s); ++w)
        begin[size_t(s + 1)] += std::popcount(uint64_t(word[w]));
  });
  for (size_t s = 1; s < begin.size(); ++s) begin[s] += begin[s - 1];
  const at::Tensor places = at::empty({begin.back()}, words.options());
  auto* const to = places.mutable_data_ptr<int64_t>();
  at::parallel_for(0, shares, 1, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      int64_t* next = to + begin[size_t(s)];
      for (int64_t w = s * kGrain; w < end_of(s); ++w)
        for (auto left = uint64_t(word[w]); left != 0; left &= left - 1)
          *next++ = kBitsOfWord * w + std::countr_zero(left);
    }
  });
  return places;
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
          "fits", [](const WeightChanges& c, py::handle param) { return c.fits(local_of(param)); },
          py::arg("param"))
      .def("places", &WeightChanges::places, py::call_guard<py::gil_scoped_release>())
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
          if (auto changes = changes_of(param); changes && changes->fits(local_of(param)))
            found.emplace_back(py::reinterpret_borrow<py::object>(param), std::move(changes));
        return found;
      },
      py::arg("params"));
  m.def("compare", &compare, py::arg("after"), py::arg("before"), py::arg("memory"),
        py::arg("dtypes"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace amp_mp
